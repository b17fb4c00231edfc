"""The whole contract, option by option and in any mix: out and lse, or the gradients, against the oracle."""

import pytest
from hypothesis import given, settings
from strategies import EVERY_VARIANT, Variant, calls, f32
from tolerances import assert_backward, assert_forward

RUN_TIME_OPTIONS = ["causal", "window", "q_offset", "scale", "sinks", "lengths"]


@pytest.fixture(params=["forward", "backward"])
def check(request, backend):
    """A function of a call: its results are those of the oracle."""

    def forward(call):
        out, lse = call.forward(backend.name)
        assert_forward(call.problem, out, lse)

    def backward(call):
        gradients = call.backward(backend.name, *call.forward(backend.name))
        assert_backward(call.problem, call.dout, call.dlse, gradients, call.options)

    return forward if request.param == "forward" else backward


def agree(check, backend, count, **drawn):
    count = max(1, int(count * backend.examples * settings().max_examples / 30))
    settings(max_examples=count)(given(calls(backend, **drawn))(check))()


@pytest.mark.emulated("float32-plain", "float32-alibi+bias+drop", "float64-alibi+bias+drop")
@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_every_variant_agrees_with_the_oracle(backend, check, variant):
    agree(check, backend, 12, variant=variant)


@pytest.mark.emulated
@pytest.mark.parametrize("option", RUN_TIME_OPTIONS)
def test_every_option_alone_agrees_with_the_oracle(backend, check, option):
    agree(check, backend, 12, variant=Variant(f32), options=frozenset({option, "causal"}))


@pytest.mark.slow
def test_any_mix_of_options_agrees_with_the_oracle(backend, check):
    agree(check, backend, 55)
