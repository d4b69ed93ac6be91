"""Each contract is seen to break on a planted import: a contract that cannot break guards nothing."""

import copy
from collections.abc import Callable
from pathlib import Path

import grimp
import pytest
from grimp import ImportGraph
from importlinter import api
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from importlinter.domain.contract import Contract

CONFIGURATION = api.read_configuration(str(Path(__file__).parents[2] / "pyproject.toml"))
SESSION = CONFIGURATION["session_options"]
CONTRACTS = {contract["name"]: contract for contract in CONFIGURATION["contracts_options"]}
KINDS: dict[str, Callable[..., Contract]] = {
    "forbidden": ForbiddenContract,
    "layers": LayersContract,
    "acyclic_siblings": AcyclicSiblingsContract,
}
PLANTED = {
    "the API is imported by everyone and so imports nobody": ("dlrm_api", "numpy"),
    "a plan is a pure function: the planner reaches no I/O, clock, random source or other package of ours": (
        "dlrm_planner",
        "time",
    ),
    "the operator's packages know only those below them": ("dlrm_operator.manifests", "dlrm_operator.reconcile.state"),
    "every package is read in one direction: no module imports what imports it": (
        "dlrm_operator.manifests",
        "dlrm_operator.reconcile.state",
    ),
    "what the operator decides is a function of what it knows: no I/O, no clock, no event loop": (
        "dlrm_operator.reconcile",
        "time",
    ),
    "the operator talks to the data plane through manifests alone": ("dlrm_operator", "dlrm_trainer"),
    "the checkpointer runs against any folder of staged rows, without Kubernetes or a trainer": (
        "dlrm_checkpointer",
        "kubernetes",
    ),
    "the sidecar loads no more than it needs: numpy and its stores' clients": ("dlrm_checkpointer", "pyarrow"),
    "model, rows and data know nothing of the loop that trains them": (
        "dlrm_trainer.embedding",
        "dlrm_trainer.checkpointing.control",
    ),
    "the checkpointer's packages know only those below them": (
        "dlrm_checkpointer.codec",
        "dlrm_checkpointer.read.restore",
    ),
    "the trainer imports only the checkpointer's public face": ("dlrm_trainer", "dlrm_checkpointer.read.restore"),
    "the trainer executes a plan and never makes one, and knows no Kubernetes": ("dlrm_trainer", "dlrm_planner"),
    "the trainer's packages know only those below them": ("dlrm_trainer.distributed", "dlrm_trainer.train"),
    "stores move bytes and know neither arrays nor the programs that use them": ("dlrm_stores", "numpy"),
    "kernels are functions over arrays: no package of ours, no torch": ("dlrm_kernels", "torch"),
    "dlrmctl reads data, traces ids and measures with the trainer's code, and starts the rest as programs": (
        "dlrm_cli",
        "dlrm_trainer.rank",
    ),
    "one module touches Kubernetes' API": ("dlrm_cli", "kubernetes"),
    "one module touches S3": ("dlrm_trainer", "boto3"),
    "one module touches fbgemm": ("dlrm_trainer", "fbgemm_gpu"),
    "Triton compiles for GPUs alone: jobs on hosts do not load it": ("dlrm_trainer", "triton"),
}


@pytest.fixture(scope="module")
def imports() -> ImportGraph:
    """Return the imports of all sources."""
    return grimp.build_graph(*SESSION["root_packages"], include_external_packages=True, cache_dir=None)


def is_kept(contract: str, imports: ImportGraph) -> bool:
    """Check a contract as ``lint-imports`` does, on a copy: a check removes the imports that it ignores."""
    options = CONTRACTS[contract]
    checked = KINDS[options["type"]](contract, SESSION, options).check(copy.deepcopy(imports), verbose=False)
    return bool(checked.kept)


def test_every_contract_has_a_planted_import() -> None:
    assert set(CONTRACTS) == set(PLANTED)


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(imports: ImportGraph, contract: str) -> None:
    package, forbidden = PLANTED[contract]
    planted = copy.deepcopy(imports)
    planted.add_module(f"{package}.planted")
    if forbidden not in planted.modules:
        planted.add_module(forbidden, is_squashed=True)
    planted.add_import(importer=f"{package}.planted", imported=forbidden, line_number=1, line_contents="")

    assert is_kept(contract, imports)
    assert not is_kept(contract, planted)
