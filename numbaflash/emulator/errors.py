"""What the emulator says about a faulty program."""


class EmulatorError(RuntimeError):
    """A program that does something the PTX ISA does not allow; the base class of all that follow.

    Attributes
    ----------
    ptx_line : int or None
        Line of the PTX text.
    source : tuple of (str, int) or None
        Python file and line, where the kernel was compiled with line information.
    """

    def __init__(self, message, ptx_line=None, source=None):
        super().__init__(message)
        self.ptx_line = ptx_line
        self.source = source


class MemoryFault(EmulatorError):
    """An access outside of every allocation, or one that is not aligned to its size."""


class UninitializedRead(EmulatorError):
    """A read of memory that nobody has written, or that an asynchronous copy has not delivered yet."""


class RaceError(EmulatorError):
    """Two accesses to one location, one of them a write, that nothing orders."""


class BarrierError(EmulatorError):
    """A barrier or a warp collective that threads reach in divergent code, or a misused mbarrier."""


class DeadlockError(EmulatorError):
    """No thread can go on, or all go round in circles. The message lists who waits where."""


class StepLimitError(EmulatorError):
    """A launch that went on for longer than ``max_steps``. The message lists who was where."""


class KernelError(EmulatorError):
    """The kernel raised a Python exception, which those compiled with ``debug=True`` can."""


class TrapError(EmulatorError):
    """The program executed ``trap``."""


class UnknownInstruction(EmulatorError, NotImplementedError):
    """PTX that the emulator does not know; the message names it."""
