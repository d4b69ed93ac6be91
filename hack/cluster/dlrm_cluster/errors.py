"""What can go wrong with the test servers. The class says who can act."""

from pathlib import Path


class ClusterError(Exception):
    """Base of every error of this package; its message is meant for the person at the terminal."""


class MissingToolError(ClusterError):
    """This machine lacks a program or its right version; the message says what to install."""


class BuildError(ClusterError):
    """Report a program that did not build; the message ends with the compiler's output."""


class StartError(ClusterError):
    """Report a server that ended or was not ready in time; the message ends with its log's last lines."""

    def __init__(self, name: str, problem: str, log: Path, tail: str) -> None:
        super().__init__(f"{name} {problem}; the end of {log}:\n{tail}")
        self.name = name


class PortTakenError(StartError):
    """Another process bound the port between our choice and the server's start; a new choice helps."""
