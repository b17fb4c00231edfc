"""The score of a pair: stages between the product ``scale * q . k`` and the softmax.

A stage is a scalar function of the score, its derivative, and its arguments; the stages of a call are applied in
the order softcap, bias, ALiBi. An empty :class:`Score` keeps the fused fast path of a kernel, where log2(e) is
folded into the scale. Each function below is plain Python on scalars, compiled into every kernel (CPU and GPU);
``tanh`` is handed in because each backend has its own.
"""

from typing import NamedTuple

from .arrays import Operand


def softcap_value(s, cap, tanh):
    """``cap * tanh(s / cap)``: scores squeezed into (-cap, cap)."""
    return cap * tanh(s / cap)


def softcap_derivative(value, cap):
    """Derivative of the softcap by its input, from its output ``value``: 1 - tanh**2."""
    t = value / cap
    return (1 - t) * (1 + t)


def alibi_value(s, slope, position, key):
    """ALiBi (Press et al., 2022): a penalty that grows with the distance; the derivative by ``s`` is 1."""
    distance = position - key
    return s - slope * abs(distance)


class Score(NamedTuple):
    """The stages of one call; None leaves a stage out.

    Attributes
    ----------
    softcap : float or None
        The cap c of ``c * tanh(s / c)``.
    bias : Operand or None
        Added after the cap: (sequences, H, q, k), broadcast axes with stride 0.
    bias_shape : tuple of int or None
        The bias' own shape, padded to four axes: 1 where it was broadcast and its gradient is summed.
    alibi : Operand or None
        Slopes as float64 (sequences, H); the sequence axis may have stride 0.
    """

    softcap: float | None = None
    bias: Operand | None = None
    bias_shape: tuple[int, ...] | None = None
    alibi: Operand | None = None

    @property
    def is_empty(self) -> bool:
        """True when the score is the scaled product alone."""
        return self.softcap is None and self.bias is None and self.alibi is None
