"""What is computed: every keyword of a call, in one frozen value that all entry points pass on whole."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The keywords shared by attention, its gradients and everything built on them.

    See :func:`numbaflash.attention` for what each one means. ``out=``, ``return_lse`` and ``stream`` say how a
    call runs, not what it computes, and stay out of here.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    q_offset: int | Sequence[int] | np.ndarray | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    dropout_p: float = 0.0
    seed: int | None = None
    score_mod: Callable | None = None
    mask_mod: Callable | None = None
    mod_args: tuple = ()
    score_mod_grad: Callable | None = None
    mod_args_grad: bool = False
    block_mask: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    layout: str = "BHND"
    out_dtype: Any = None
    precision: str = "ieee"
    deterministic: bool = False
    validate: bool = False
    backend: str = "auto"
    config: Any = None

    @classmethod
    def of(cls, values: tuple) -> "Options":
        """Options from the values of all fields in order: what a frozen dataclass' own ``__init__`` does one guarded
        assignment at a time, in one go (0.5 instead of 4 us of a call)."""
        options = object.__new__(cls)
        options.__dict__.update(zip(cls.__dataclass_fields__, values, strict=True))
        return options


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of one call; ``dq, dk, dv = gradients`` unpacks the three that always exist.

    Attributes
    ----------
    dq, dk, dv : array
        Shape, dtype and kind of q, k and v.
    dbias : array or None
        Shape and dtype of bias, summed over its broadcast axes; None where no bias was given.
    dsinks : array or None
        Shape and dtype of sinks; None where none were given.
    dmod_args : tuple or None
        Gradients of a score_mod's arguments, where asked for.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None
    dmod_args: tuple | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dq, self.dk, self.dv))
