"""The errors a user can meet, each with the exit code its kind ends the program with."""

from __future__ import annotations


class MegadapoError(Exception):
    """Base of every error that is reported as one message, without a traceback."""

    exit_code = 1


class ConfigError(MegadapoError):
    """The configuration is wrong; nothing was started."""

    exit_code = 2


class DataError(MegadapoError):
    """A prompt, gold answer, model folder or data file cannot be used."""

    exit_code = 3


class SamplingError(MegadapoError):
    """Too few groups have both right and wrong responses, so that no batch can be filled."""

    exit_code = 3


class RewardError(MegadapoError):
    """A reward function failed, and the configuration says to stop then."""

    exit_code = 3


class WeightError(MegadapoError):
    """A weight is missing, unknown, or does not have the shape its layout says."""

    exit_code = 3


class CheckpointError(MegadapoError):
    """A checkpoint is damaged, incomplete or belongs to another run."""

    exit_code = 4


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is not what was written; an earlier checkpoint may be."""


class InfraError(MegadapoError):
    """A process, engine, device or collective failed or missed its deadline."""

    exit_code = 5


class ProcessDiedError(InfraError):
    """A process of the run is gone."""


class OutOfMemory(ProcessDiedError):
    """A process was killed because its node's memory was nearly full."""


class NodeDiedError(ProcessDiedError):
    """The node that a process was on does not answer any more."""


class ProcessHungError(InfraError):
    """A process is there, but did not answer or get on in time."""


class DataLostError(InfraError):
    """What one process left in Ray's memory for another one is gone, or found no room there."""


class CallCancelledError(InfraError):
    """Ray ended a call, or never began it, without the process being at fault."""


class OracleError(MegadapoError):
    """A measured invariant left its bounds, so the run was stopped before it could do harm."""

    exit_code = 6


class RunInterruptedError(MegadapoError):
    """The run was asked to stop; its state is saved and it can be resumed."""

    exit_code = 75
