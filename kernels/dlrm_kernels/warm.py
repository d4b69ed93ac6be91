"""Compile every kernel for the arguments that jobs pass: ``python -m dlrm_kernels.warm``, run while an image is built.

numba keeps machine code by the types and layouts of arguments, and some kernels are specialized for sizes too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from dlrm_kernels import (
    admission,
    bags,
    directory,
    dirty_rows,
    eviction,
    hashing,
    initial_rows,
    interaction,
    key_filters,
    messages,
    packing,
    pages,
    parallel,
    parsing,
    quantize,
    reuse,
    row_cache,
    row_updates,
    slabs,
)
from dlrm_kernels.cache import compilations
from dlrm_kernels.intrinsics import size_of
from dlrm_kernels.replacement import LRU, META_WORDS, Replacement

Example = tuple[Callable[..., Any], tuple[Any, ...]]
DIMS = (16, 32, 64, 128)
"""Columns of a row."""
FEATURES = (13, 26)
"""Features that interact, next to dense ones: those of the quickstart, and Criteo's."""
U64 = np.uint64


def _zeros(kind: str) -> Callable[..., Any]:
    return partial(np.zeros, dtype=kind)


i8, i16, i32, i64 = map(_zeros, ("i1", "i2", "i4", "i8"))
u8, u16, u32, u64, f32, f64 = map(_zeros, ("u1", "u2", "u4", "u8", "f4", "f8"))


def examples(dims: Sequence[int] = DIMS, features: Sequence[int] = FEATURES) -> Iterator[Example]:
    """Yield kernels with arguments of a few rows: dtypes, layouts and sizes as the packages above pass them."""
    yield from _of_data()
    yield from _of_codes()
    yield from _of_ids()
    yield from _of_keys()
    yield from _of_pages()
    for place in (np.int32, np.int64):
        yield from _of_slots(place)
    yield dirty_rows.save_before_update, _saved(1)
    yield from _of_slabs()
    for dim in dims:
        yield from _of_dim(dim)
        for count in features:
            yield from _of_interaction(count, dim)


def _loop(kernel: Callable[..., Any], *arguments: Any) -> Example:
    """Return an example of a kernel that ``parallel_for`` runs."""
    return kernel, (i64(parallel.COUNTS), 1, *arguments)


def _as_is(array: Any) -> Any:
    return array


def _frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


def _of_data() -> Iterator[Example]:
    """Yield loops over the samples of files, their order, and traces."""
    size = U64(4)
    yield hashing.inverse_of, (size,)
    yield hashing.shuffle, (u64(2), u64(2) + size, u64(2), size, U64(1))
    yield parallel._await, (i64(parallel.COUNTS), 0)
    text, roles = b"1\t5\tff", np.array([parsing.LABEL, parsing.INTEGER, parsing.ID], np.uint8)
    line = np.frombuffer(text, np.uint8), i64(1), i64(1) + len(text), roles, False, (i64(1) + 1, i64(1) + 2), i64(1)
    yield parsing.find_newlines, (_frozen(u8(9)), i64(1))
    yield parsing.parse_lines, (*line, f32((1, 2)), i64((1, 1)))
    yield parsing.parse_good_lines, (*line, f32((1, 2)), i64((1, 1)), np.zeros(1, np.bool_))
    for values in (f64(2), _frozen(f64(2))):
        yield parsing.put_labels, (values, f32(2))
    for values in (f32(2), f64(2)):
        yield parsing.put_floats, (values, u8(0), f32(2))
    hashed = parsing.Hashing(parsing.MIX, size, U64(2**62))
    for values, rows in product((i64(2), _frozen(i64(2)), _frozen(u32(2))), (i64(2), u32(2))):
        yield parsing.put_rows_of, (values, hashed, rows)
    yield hashing.hash_texts, (u8(2), i64(3), i64(2))
    yield parsing.check_bags, (i64(2), i32((1, 2)) + np.int32(1), i64(1), i64(1) + 1)
    yield parsing.fill_missing, (f32(2), np.float32(0))
    for rule in (parsing.count_by_block, parsing.sort_by_block):
        yield rule, (i64(2), np.array([0, 2]))
    for kind in (f32, i64, u32):
        yield parsing.put_rows, (kind(4), i64(2), i64(2), kind((2, 2)))
    for values in (f32(4), i64(4)):
        yield parsing.pack_runs, (values, i32((2, 2)) + np.int32(1), values.copy())
        yield parsing.lay_out_bags, (values, i64(2), i32((2, 2)) + np.int32(1), values.copy())
    yield parsing.transpose, (f32((2, 3)), f32((3, 2)))
    for column, row in product((i64, u32), repeat=2):
        yield parsing.transpose, (column((2, 3)), row((3, 2)))
    for column in (i64, u32):
        yield parsing.transpose, (column((3, 2)).T, i64((2, 3)).T)
    yield parsing.split_numbers, (f32((2, 3)), f32(2), f32((2, 2)))
    stack = reuse._Stack(i64(4) - 1, i64(4), i32(4), i64(4), i32(4) - np.int32(1), i64(5), f64((2, 4)))
    yield reuse._fill, (stack, i64(0), i64(0), i64(0))
    yield reuse._seek, (stack, np.arange(2), i64(2) + 1, 0, i64(2))
    yield reuse._use, (stack, i64(2), 1, 0)
    yield reuse._remove, (stack, i64(0), i64(0), i64(0))
    yield reuse._sampled, (i64(2), 1)


def _of_codes() -> Iterator[Example]:
    """Yield loops over snapshots: quantized rows, and pieces of chains. Rows of a hand-off folder are read-only."""
    for freeze in (_as_is, _frozen):
        rows, body, halves = freeze(f32((2, 4))), freeze(u8((2, 4))), freeze(u16((2, 4)))
        yield quantize.largest_word, (rows.reshape(-1).view(np.int32),)
        yield quantize.code_rows, (rows, 4, 45, 9, u8((2, 2)), u16(2), u16(2), i8(2))
        yield quantize.code_halves, (rows, u16((2, 4)), i8(2))
        yield quantize.decode_halves, (halves, np.float32(1), f32((2, 4)))
        yield packing.decode, (body, 8, f32(2), f32(2), i64(0), f32((2, 4)))
        yield packing.unpack, (body, 4, u8((2, 8)))
        yield packing.place_rows, (i64(1), i64(1), U64(4), freeze(u8(4)), u8(4))
        yield packing.unpack_keys, (freeze(u8(1)), U64(0), U64(0), i64(1))
    yield packing.pack, (u8((2, 4)), 4, u8((2, 2)))
    yield packing.pack_keys, (i64(1), U64(0), u8(1))
    yield packing.newest_rows, (i64(2), np.array([0, 1, 2]), i64(2), u16(2), i64(2))
    yield packing.see_rows, (u8(1), i64(2), np.empty(2, np.bool_))


def _of_ids() -> Iterator[Example]:
    """Yield loops over bags of ids and over bitmaps of rows."""
    for values in (i64(2), f32(2)):
        yield bags.copy_segments, (values, i64(1), i64(1) + 2, values.copy())
    yield bags.copy_segments, (u32(2), i64(1), i64(1) + 2, i64(2))
    yield bags.place_segments, (u8(2), i64(1), i64(1) + 2, u8(2), i64(1))
    yield bags.fill_offsets, (i32(2), u64(3))
    yield bags.choose_ids, (np.zeros(2, np.bool_), i32(1) + np.int32(2), i64(2), i32(1))
    yield (
        bags.split_ids,
        (i64(2), i32((1, 2)) + np.int32(1), np.array([0, 4]), np.array([0, 2]), i64(1), i32((1, 2)), i64(2), i64(2)),
    )
    for came, ids in product((u8, i16, i32), (i32, i64)):
        one = i64(1) + 1
        bounds = one, np.array([[0, 1]]), i32((1, 1)), i64(1), f32(0), i64(1), i64(3)
        yield messages.join_bags, (came(1) + came(1).dtype.type(1), ids(1), f32(0), one, one, *bounds)
    yield from _of_messages()
    marked, other, one = dirty_rows.bitmap_of(1), dirty_rows.bitmap_of(1), i64(1) + 2
    yield dirty_rows.mark_rows, (marked, np.arange(2), one, i64(1))
    yield dirty_rows.move_rows, (other, marked)
    yield dirty_rows.clear_bits, (other.words, i64(1))
    map_ = _cut_map(dirty_rows.lines_of([other], 0, 1))
    yield dirty_rows.count_bits, (map_.pending.words,)
    yield dirty_rows.add_lines, (map_.pending.numbers, other, map_.pending.words)
    yield dirty_rows.list_rows, (map_.pending.words, map_.pending.numbers, 0, i64(2))
    yield dirty_rows.lay_rows, (map_, 0, 1, U64(2))
    yield dirty_rows.take_laid, (map_, 0, 1, np.int64(0), 0, i64(2), i64(2), i64(2))
    yield dirty_rows.clear_rows, (map_.pending, np.int64(0), i64(1))
    yield dirty_rows.clear_lines, (other, 0, 1)


def _cut_map(pending: dirty_rows.Lines) -> dirty_rows.CutMap:
    one = u64(1)
    return dirty_rows.CutMap(pending, np.zeros_like(pending.words), u64(len(pending.numbers)), one, one, one)


def _of_messages() -> Iterator[Example]:
    """Yield loops over messages of vectors: one sample, with one column of rank 0."""
    edges, none = np.array([0, 1]), i64(0)
    pieces = messages.Pieces(i64(1), i64(1) + 4, edges, i64(1), i64(1) + 4)
    extent = messages.Extent(i64(1) + 4, i64(1), i64(1), i64(1) + 1, i64(1), none, i64(2))
    message, array, scales = messages.Message.of(u8(16)), f32(4), f32(1)
    yield _loop(messages.pack, i64(1), pieces, extent, edges, 1, scales, array, message)
    yield _loop(messages.unpack, i64(1), pieces, extent, edges, 1, scales, message, True, array)
    yield messages.find_largest, (i64(1), pieces, extent, edges, 1, array, scales)
    yield _loop(messages.copy_own, pieces, extent, 0, extent, 0, 1, 1, f32(4), array, True, True)
    chosen = messages.Chosen(i64(1), i64(1) + 1, i64(1) + 4, i64(1), i64(1))
    yield messages.find_places, (chosen, i32((1, 1)), i64(1), i64(1) + 1, i64(1), i64(2))


def _of_keys() -> Iterator[Example]:
    """Yield loops over the keys of a unique table: two of them in one bucket."""
    keys, some = np.arange(2), np.arange(2)
    yield hashing.keys_of_ids, (u64(2), U64(1))
    yield hashing.ids_of_keys, (u64(2), U64(1))
    made = directory.make_directory(first_bucket=0, buckets=1, all_buckets=1, quota=2, homes=3, stride=8, rows=2)
    yield directory.insert, (made, keys, i64(2), i64(2))
    yield directory.find, (made, keys, i64(2), i64(2))
    group, _ = directory.make_group([made], i64(18).reshape(9, 2))
    starts, last, unit = i64(1), i64(1) + 2, i64(1) + 1
    yield _loop(directory._find_units, group, starts, last, unit, keys, i64(2), i64(2))
    chances, found = admission.Chances(u64(1), u64(1)), (i64(2), i64(2), i64((2, 1)), i64(1))
    yield _loop(admission._insert_units, group, starts, last, keys, i64(2), i64(2), chances, *found)
    yield directory.touch, (made.slots, some, some)
    touches = eviction.Touches(some, last, np.array([0, 1]), starts, f32(0))
    yield _loop(eviction._touch_units, group, touches, some[:1])
    yield _loop(admission._locate_sights, group, some[:0], some[:0], some[:0], i64((0, 2)))
    yield _loop(admission._count_sights, group, some[:0], some[:0], i64((0, 2)), some[:0])
    yield _loop(admission._survey_sights, made, np.zeros(1, np.bool_), np.zeros(0, np.bool_))
    yield admission.settle_sights, (made, some[:0], np.zeros(1, np.bool_))
    ends = np.array([0, 1])
    yield _loop(directory._list_buckets, made, np.array([0, 2]), i64(2), i64(2))
    yield _loop(directory._describe_buckets, made, u32(0), i64(2), u32((2, 1)))
    yield _loop(eviction._count_expired, made, i64(1), 1, i64(1))
    yield _loop(eviction._sweep_buckets, made, i64(1), 1, ends, i64(1), i64(1))
    yield directory.free_rows, (made, some)
    yield key_filters.add_keys, (u64(8), keys)
    yield key_filters.count_known, (u64(8), i64((1, 2)), i64(1) + 1, keys, last, i64(1))


def _of_pages() -> Iterator[Example]:
    """Yield loops over the levels below the slots: two records of four words in a page, one page in a segment."""
    shape = pages.Shape(words=4, page_words=8, page_records=2, segment_records=2)
    records, owners, image, some = u32((2, 4)), i64(2), u32(8), np.arange(2)
    yield pages.pack, (shape, some, records, image, 0, owners)
    yield pages.unpack, (shape, image, owners, i64(2), records)
    yield pages.move, (shape, image, i64(2), u32(8), 0, owners, i64(2))
    yield pages.read_buffered, (shape, some, i32(1), u32((1, 8)), records, i64(2))
    yield pages.read_pages, (shape, i64(1), i64(1), u32((1, 8)), np.array([0, 2]), some, some, records)
    tree = pages.empty_tree(2)
    yield pages.set_leaf, (tree, 0, np.int32(0))
    yield pages.release, (shape, some, i64(2) + 1, i32(1) + np.int32(2), tree, i64(2))
    yield pages.emptiest, (i32(2), tree, i64(1))
    yield pages.gather_records, (u32((2, 3)), u32((2, 1)), some, u32((2, 5)))
    yield pages.scatter_records, (u32((2, 3)), u32((2, 1)), some, u32((2, 5)))
    order, ends = i32((2, pages.ORDER_WORDS)), i64(2)
    yield pages.append_order, (order, ends, some, some)
    yield pages.list_oldest, (order, ends, i64(2), i64(2))
    yield pages.remove_order, (order, ends, some)
    yield _loop(pages._store_units, records, some, u32((2, 4)))
    yield _loop(pages._load_units, records, some, u32((2, 4)))


def _of_slots(place: Any) -> Iterator[Example]:
    """Yield loops over the slots of two rows of one table, through which places of this integer type pass."""
    edges, some = np.array([0, 4]), np.arange(2)
    replacement = Replacement(policy=LRU, ways=0, lists=i64((1, 1, 3)), max_protected=i64(1))
    row_map = row_cache.RowMap(
        place_of=np.zeros(4, place),
        row_starts=edges,
        slot_starts=edges,
        capacity=i64(1) + 2,
        meta=i32((4, META_WORDS)),
        filled=i64((1, 3)),
        replacement=replacement,
        stats=i64((1, row_cache.COUNTS)),
    )
    found = row_cache.LookupResult(i64(2), i32(2), i64(2), i64(2), i64(2), i64(2), i64(2))
    ends, meta = i64(1) + 2, row_map.meta
    yield row_cache.find, (row_map, some, ends, 1, found)
    yield row_cache.admit, (row_map, 1, found, 0, 2)
    yield row_cache.resolve, (row_map, ends, found, 2)
    yield row_cache.order_by_page, (row_map, found.targets, found.sources, 1, 1, i64(2))
    yield row_cache.enlist, (row_map, found.targets, u32(2))
    yield row_cache.release, (row_map, found.distinct, i64(2))
    yield row_cache.borrow, (row_map, some, ends, found)
    for slots in (i64(0), i32(0)):
        yield row_cache.vacate, (row_map, slots)
    yield row_cache.rows_of_slots, (meta, some, i64(2))
    yield row_cache.counts_of_slots, (meta, some, u32(2))
    yield row_cache.point, (row_map.place_of, some, some, 1)
    yield row_cache.drop_rows, (row_map, i64(0), i64(0))
    initial = initial_rows.InitialRows(i64(1), u64(1), f32(1) + np.float32(1))
    yield initial_rows.fill_initial, (some, i64(2), initial, f32((2, 4)))
    for kind in (np.float32, np.float16):
        memory = row_updates.memory_of(np.zeros((2, 4), kind), f32((2, 1)))
        yield _loop(initial_rows._start_units, memory, 4, 1, some, some, i64(2), initial)
    moved = i64(2), some, i64(2) - 1, np.empty(2, np.bool_), u32(2)
    yield row_cache.swap_rows, (u32((2, 3)), u32((2, 1)), u32((2, 5)), meta, row_map.place_of, *moved)


def _of_dim(dim: int) -> Iterator[Example]:
    """Yield loops over rows of ``dim`` columns: one sample looks up one row of one table."""
    size, rows, state, one = size_of(dim), f32((2, dim)), f32((2, 1)), u64(1)
    memory, offsets, width = row_updates.memory_of(rows, state), np.array([0, 1], np.uint64), U64(dim)
    yield _loop(bags.pool, size, i64(1), memory, one, one, one, offsets, f32(0), 1, width, f32(dim))
    yield bags.copy_rows, (rows, state, i64(1), f32((1, dim)), f32((1, 1)), i64(0), 1)
    rule = row_updates.constants_of("sgd", 0.1, 1e-8, 0.9, 0.999)
    layout = row_updates.Layout(one, one, one, one, offsets, one, one)
    lookups = row_updates.Lookups(one, one, offsets, f32(0), f32(dim), 1, width)
    work = row_updates.Work(one, one, one + U64(1))
    yield row_updates.divide_work, (i64(1), offsets, offsets, 1, 1, 1)
    yield _loop(row_updates.update_rows_of_bags, size, work, memory, layout, lookups, rule, u64(0))
    yield _loop(row_updates.add_gradients, size, work, layout, lookups, f32(2 * dim), f32(2))
    yield _loop(row_updates.update_summed_rows, size, memory, layout, one, f32(2 * dim), rule, u64(0))
    yield dirty_rows.save_before_update, _saved(dim)
    held, tables = _slabs(dim)
    kind, utility = U64(1), slabs.Utility(1.0, 1.0, 1.0)
    yield _loop(slabs.pool, size, held, tables, U64(4), one, offsets, f32(0), 1, width, f32(dim))
    yield _loop(slabs.update_rows_of_bags, size, work, held, tables, kind, layout, lookups, rule, utility)


def _slabs(dim: int) -> tuple[slabs.Slabs, slabs.SlabTables]:
    one, initial = u64(1), initial_rows.InitialRows(i64(1), u64(1), f32(1))
    return slabs.make_slabs(2, (4, dim), 1, np.zeros), slabs.SlabTables(one, one, one, one, initial)


def _of_slabs() -> Iterator[Example]:
    """Yield loops over rows of several sizes that do not depend on the largest."""
    (held, tables), some = _slabs(8), np.arange(2)
    classes, targets = u8(2) + np.uint8(1), u8((3, slabs.BINS))
    yield slabs.store_rows, (held, some, classes, f32((2, 4)), f32((2, 1)), f32(2))
    yield slabs.begin_rows, (held, some[:0], some[:0], some[:0], tables.initial, U64(1))
    yield slabs.move_rows, (held, some, classes)
    yield slabs.copy_rows, (held, tables, 0, some, f32((2, 8)), f32((2, 3)), 1)
    yield slabs.histogram, (held, 1, 1.0, 1)
    yield slabs.choose_moves, (held, slice(0, 2), 1, 1.0, targets, 1)


def _saved(dim: int) -> tuple[Any, ...]:
    """Return arguments of ``save_before_update``; records without rows in place have one column."""
    memory = row_updates.memory_of(f32((2, dim)), f32((2, 1)))
    map_ = _cut_map(dirty_rows.lines_of([dirty_rows.bitmap_of(1)], 0, 1))
    return size_of(dim), memory, map_, U64(1), U64(1), i64(1), i64(1) + 1, i64(1), i64(1), f32(2 * dim), i64(1)


def _of_interaction(features: int, dim: int) -> Iterator[Example]:
    """Yield products of a sample's vectors, and their gradients."""
    bottom, inputs = f32((1, dim)), f32((1, features * dim))
    out = f32((1, dim + (features + 1) * features // 2))
    yield interaction.dot_products, (bottom, inputs, out, dim, 1)
    yield interaction.dot_gradients, (bottom, inputs, out, bottom, inputs, dim, 1)


def compile_all(table: Iterable[Example]) -> int:
    """Call kernels with their arguments, so that the cache holds their code; return how many failed."""
    start, failed, count = time.monotonic(), 0, 0
    for kernel, arguments in table:
        before, count = compilations(), count + 1
        try:
            kernel(*arguments)
        except Exception as error:
            print(f"failed to compile {_name(kernel)}: {error!r}", file=sys.stderr)
            failed += 1
        if compilations() > before:
            print(f"{time.monotonic() - start:6.1f} s: compiled {_name(kernel)}", flush=True)
    print(f"called {count} examples, compiled {compilations()} versions of kernels, {failed} failed")
    return failed


def _name(kernel: Callable[..., Any]) -> str:
    return f"{kernel.__module__.removeprefix('dlrm_kernels.')}.{kernel.__name__}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dlrm_kernels.warm", description="Compile all kernels.")
    parser.add_argument("--dims", type=int, nargs="*", default=DIMS, help="Columns of rows [default: %(default)s].")
    parser.add_argument("--features", type=int, nargs="*", default=FEATURES, help="Features that interact.")
    sys.exit(compile_all(examples(**vars(parser.parse_args()))) > 0)
