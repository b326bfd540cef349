"""Every error type that a user can see, with the exit code of the program."""

from __future__ import annotations


class MegadapoError(Exception):
    """Base of all errors that are reported as one message without a traceback."""

    exit_code = 1


class ConfigError(MegadapoError):
    """The configuration is wrong; nothing was started."""

    exit_code = 2


class DataError(MegadapoError):
    """A prompt, gold answer, model folder or data file cannot be used."""

    exit_code = 3


class SamplingError(MegadapoError):
    """Too few groups have both correct and incorrect responses to fill a batch."""

    exit_code = 3


class RewardError(MegadapoError):
    """A reward function failed, and its `on_failure` is "stop"."""

    exit_code = 3


class WeightError(MegadapoError):
    """A weight is missing, unknown, or has another shape than the layout requires."""

    exit_code = 3


class CheckpointError(MegadapoError):
    """A checkpoint is damaged, incomplete or belongs to another run."""

    exit_code = 4


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint differs from what was written; an earlier one may be intact."""


class InfraError(MegadapoError):
    """A process, engine, device or collective failed or missed its deadline."""

    exit_code = 5


class RewardOutageError(InfraError):
    """A reward function could not do its work, as without its server; the responses can wait."""


class ProcessDiedError(InfraError):
    """A process of the run is gone."""


class NodeOutOfMemoryError(ProcessDiedError):
    """A process was killed because its node's memory was nearly full."""


class NodeDiedError(ProcessDiedError):
    """The node of a process no longer answers."""


class ProcessHungError(InfraError):
    """A process exists, but did not answer or make progress in time."""


class DataLostError(InfraError):
    """An object in Ray's memory is lost, or did not fit into it."""


class CallCancelledError(InfraError):
    """Ray cancelled a call, or never started it; the process is not at fault."""


class OracleError(MegadapoError):
    """A measured invariant left its bounds, and the run was stopped."""

    exit_code = 6


class RunInterruptedError(MegadapoError):
    """The run was asked to stop; its state is saved and it can be resumed."""

    exit_code = 75
