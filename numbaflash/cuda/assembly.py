"""How a PTX instruction becomes a function that Numba kernels can call.

An `Instruction` is a row: PTX text with its operands by name, their kinds, the result and what LLVM may
do with it.  `op` turns a row into a Numba intrinsic that emits one inline-assembly statement.  `ptx.py`
holds the rows; no other file makes one.
"""
import inspect
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.core.typing import signature
from numba.cuda.extending import intrinsic

# --- operands -------------------------------------------------------------------------------------


class Scalar(NamedTuple):
    """One register: its Numba type and LLVM's letter for the register class."""

    type: types.Type
    letter: str


class Immediate(NamedTuple):
    """An integer that is part of the instruction; the kernel must pass a constant."""


class Predicate(NamedTuple):
    """A truth value: a bool in the kernel, 0 or 1 in a 32-bit register in the text."""


class Written(NamedTuple):
    """A fragment that the instruction writes."""

    letter: str
    size: int


class Read(NamedTuple):
    """A fragment that the instruction reads."""

    letter: str
    size: int


class Updated(NamedTuple):
    """A fragment that is read and written: {name} is the destination, {name_in} the source."""

    letter: str
    size: int


B16 = Scalar(types.uint16, "h")
B32 = Scalar(types.uint32, "r")
S32 = Scalar(types.int32, "r")
S64 = Scalar(types.int64, "l")
F32 = Scalar(types.float32, "f")
F64 = Scalar(types.float64, "d")
SHARED = S32            # address in the shared window
GLOBAL = S64            # address in global memory
PREDICATE = Predicate()
IMMEDIATE = Immediate()

FRAGMENTS = (Written, Read, Updated)
OUTPUTS = (Written, Updated)
INT32, INT64 = ir.IntType(32), ir.IntType(64)
LLVM = {"h": ir.IntType(16), "r": INT32, "l": INT64, "f": ir.FloatType(), "d": ir.DoubleType()}
PTX_TYPE = {"h": "b16", "r": "b32", "l": "b64", "f": "f32", "d": "f64"}


class Effect(NamedTuple):
    """What LLVM may do with an instruction."""

    volatile: bool          # stays where it is written, and is never dropped
    memory: bool            # no load or store moves across it
    convergent: bool        # never moved into or out of a branch: other threads take part


PURE = Effect(False, False, False)
PLACED = Effect(True, False, False)
MEMORY = Effect(True, True, False)
WARP = Effect(True, True, True)
WARP_PURE = Effect(False, False, True)


class Instruction(NamedTuple):
    """One row: the text, its operands by name, the result if there is one, and where it is allowed."""

    section: str
    text: str
    effect: Effect
    arch: str
    result: "Scalar | Predicate | None"
    operands: dict

    def call(self, name: str) -> str:
        """How a kernel writes the call."""
        arguments = []
        for operand, kind in self.operands.items():
            arguments += [operand, f"{operand}_index"] if isinstance(kind, FRAGMENTS) else [operand]
        return f"{name}({', '.join(arguments)})"


# --- from a row to a Numba intrinsic --------------------------------------------------------------

_ROWS: dict = {}            # id of the intrinsic -> Instruction


def op(section, text, effect=MEMORY, result=None, arch="sm_75", doc="", **operands):
    """Make one instruction callable from kernels.

    Parameters
    ----------
    section : str
        Title of the section of the PTX ISA that defines the instruction.
    text : str
        PTX; ``{name}`` is an operand, ``{d}`` the result.
    effect : Effect
        `PURE`, `PLACED`, `MEMORY`, `WARP` or `WARP_PURE`.
    result : Scalar or Predicate, optional
        What the call returns.
    arch : str
        The first architecture that has the instruction.
    doc : str
        What a reader of the call must know beyond the text.
    **operands
        Kind of each operand, in the order of the arguments.

    Returns
    -------
    intrinsic
    """
    row = Instruction(section, text, effect, arch, result, operands)

    def typing_function(context, *arguments):
        formal = []
        remaining = iter(arguments)
        for name, kind in operands.items():
            actual = next(remaining)
            if isinstance(kind, FRAGMENTS):
                if not isinstance(actual, types.Array):
                    raise TypingError(f"{name} must be a cuda.local.array, got {actual}")
                formal += [actual, next(remaining)]
            elif isinstance(kind, Immediate):
                if not isinstance(actual, types.IntegerLiteral):        # Numba tries without literals first
                    raise TypingError(f"{name} must be a constant integer, got a run-time {actual}")
                formal.append(actual)
            else:
                formal.append(types.boolean if isinstance(kind, Predicate) else kind.type)
        returned = types.void if result is None else types.boolean if result is PREDICATE else result.type

        def codegen(context, builder, sig, values):
            return _emit(row, context, builder, sig, values)

        return signature(returned, *formal), codegen

    # Numba reads the arity off the signature; *arguments alone would be packed into a tuple.
    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, kind in operands.items():
        for part in (name, f"{name}_index")[:2 if isinstance(kind, FRAGMENTS) else 1]:
            parameters.append(inspect.Parameter(part, inspect.Parameter.POSITIONAL_OR_KEYWORD))
    typing_function.__signature__ = inspect.Signature(parameters)
    typing_function.__doc__ = f"``{text}``\n\nPTX ISA: {section}. From {arch}. {doc}".rstrip()
    function = intrinsic(typing_function)
    _ROWS[id(function)] = row
    return function


def _emit(row, context, builder, sig, values):
    """One call of inline assembly, its operands numbered as LLVM wants them: results first."""
    actual = _actual_operands(row, context, builder, sig, values)
    spelled, outputs, results, arguments = {}, [], [], []       # operand names, pointers, letters twice
    inputs = []

    if row.result is not None:
        spelled["d"] = "$0"
        results.append("r" if row.result is PREDICATE else row.result.letter)
    for name, kind in row.operands.items():
        if isinstance(kind, OUTPUTS):
            spelled[name] = _registers(len(results), kind.size)
            results += [kind.letter] * kind.size
            outputs += actual[name]

    def read(value, letter):
        inputs.append(_bitcast(builder, value, LLVM[letter]))
        arguments.append(letter)

    for name, kind in row.operands.items():
        first = len(results) + len(inputs)
        if isinstance(kind, (Read, Updated)):
            spelled[f"{name}_in" if isinstance(kind, Updated) else name] = _registers(first, kind.size)
            for pointer in actual[name]:
                read(builder.load(pointer), kind.letter)
        elif isinstance(kind, Immediate):
            spelled[name] = str(actual[name])
        elif isinstance(kind, Predicate):
            spelled[name] = f"${first}"
            read(builder.zext(actual[name], INT32), "r")
        elif isinstance(kind, Scalar):
            spelled[name] = f"${first}"
            read(actual[name], kind.letter)

    value = _call(row, builder, row.text.format(**spelled), results, arguments, inputs)
    for i, pointer in enumerate(outputs):
        element = value if len(results) == 1 else builder.extract_value(value, i)
        builder.store(_bitcast(builder, element, pointer.type.pointee), pointer)
    if row.result is PREDICATE:
        return builder.icmp_unsigned("!=", value, ir.Constant(INT32, 0))
    return context.get_dummy_value() if row.result is None else value


def _actual_operands(row, context, builder, sig, values) -> dict:
    """By operand name: the pointers of a fragment, the number of an immediate, the value of a scalar."""
    actual, position = {}, 0
    for name, kind in row.operands.items():
        if isinstance(kind, FRAGMENTS):
            actual[name] = _elements(context, builder, sig, values, position, kind.size)
            position += 2
        else:
            immediate = isinstance(kind, Immediate)
            actual[name] = sig.args[position].literal_value if immediate else values[position]
            position += 1
    return actual


def _elements(context, builder, sig, values, position, size):
    """Pointers to the registers of fragment i of a local array (LLVM promotes such arrays to registers)."""
    data = context.make_array(sig.args[position])(context, builder, values[position]).data
    index = context.cast(builder, values[position + 1], sig.args[position + 1], types.int64)
    first = builder.mul(index, ir.Constant(INT64, size))
    return [builder.gep(data, [builder.add(first, ir.Constant(INT64, i))]) for i in range(size)]


def _call(row, builder, text, results, arguments, inputs):
    types_out = [LLVM[letter] for letter in results]
    if len(types_out) > 1:
        result_type = ir.LiteralStructType(types_out)
    else:
        result_type = types_out[0] if types_out else ir.VoidType()
    function_type = ir.FunctionType(result_type, [value.type for value in inputs])
    constraints = ["=" + letter for letter in results] + arguments + ["~{memory}"] * row.effect.memory
    assembly = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=row.effect.volatile)
    attributes = ["nounwind"] + ["convergent"] * row.effect.convergent
    attributes += [] if row.effect.volatile else ["readnone"]
    return builder.call(assembly, inputs, attrs=attributes)


def _registers(first: int, size: int) -> str:
    """PTX operand list of a fragment, from operand number `first` on."""
    return "{" + ",".join(f"${first + i}" for i in range(size)) + "}"


def _bitcast(builder, value, wanted):
    return value if value.type == wanted else builder.bitcast(value, wanted)


def name_rows(namespace: dict) -> dict[str, Instruction]:
    """Give every intrinsic in a module's namespace its own name; return the rows by name."""
    rows = {}
    for name, value in namespace.items():
        if id(value) in _ROWS:
            rows[name] = row = _ROWS[id(value)]
            value.__name__ = value._name = value.__wrapped__.__name__ = value.__wrapped__.__qualname__ = name
            value.__doc__ = f"{row.call(name)}: {value.__doc__}"
    return rows
