"""Products with weights in ggml's blocks, against NumPy; their machine code on other processors."""

import os
import re
from functools import cache

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.engine.model.transformer.checkpoint import PACKED, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0
from mpissd.engine.model.transformer.numba_ops import packed
from tests.scripts import python

OUTPUTS, INPUTS, FIRST = 80, 768, 16


@cache
def weights(kind: int, inputs: int = INPUTS) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Random blocks of a type, and their values [OUTPUTS, inputs]."""
    dice, ggml_type = np.random.default_rng(kind), gguf.GGMLQuantizationType(kind)
    count, size = gguf.GGML_QUANT_SIZES[ggml_type]
    blocks = dice.integers(0, 256, (OUTPUTS, inputs // count, size), dtype=np.uint8)
    scales = dice.normal(0, 0.01, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    places = {Q6_K: slice(208, 210), Q4_1: slice(0, 4), Q4_K: slice(0, 4)}.get(kind, slice(0, 2))
    blocks[..., places] = scales[..., : places.stop - places.start]
    return blocks, gguf.quants.dequantize(blocks.reshape(OUTPUTS, -1), ggml_type)


def in_16_bits(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns rows as a product reads them: rounded to 16 bits of the largest of 32 columns."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(32767, largest, out=np.zeros_like(largest), where=largest > 0)
    integers = np.rint(groups.astype(np.float64) * inverse).astype(np.float32)
    return (integers * (largest / np.float32(32767))).reshape(x.shape)


def product(kind: int, x: NDArray[np.float32], inputs: int = INPUTS) -> NDArray[np.float32]:
    words = packed.pack(kind, weights(kind, inputs)[0])
    out = np.full((len(x), 128), 9, np.float32)
    packed.PRODUCTS[kind](x, words, out, FIRST, len(x))
    assert (out[:, :FIRST] == 9).all() and (out[:, FIRST + OUTPUTS :] == 9).all()
    return out[:, FIRST : FIRST + OUTPUTS]


@pytest.mark.parametrize("kind", PACKED)
def test_a_product_is_that_of_the_file_s_weights_and_inputs_in_16_bits(kind: int) -> None:
    x = np.random.default_rng(0).normal(0, 1, (19, INPUTS)).astype(np.float32)
    x[3], x[4, :32] = 0, 0
    exact = in_16_bits(x).astype(np.float64) @ weights(kind)[1].T.astype(np.float64)
    found = product(kind, x)
    assert np.abs(found - exact).max() < 1e-6 * np.abs(exact).max()
    unrounded = x.astype(np.float64) @ weights(kind)[1].T.astype(np.float64)
    assert np.abs(found - unrounded).max() < 4e-5 * np.abs(exact).max()


@pytest.mark.parametrize("kind", PACKED)
def test_a_row_is_itself_alone_in_a_tile_of_any_size(kind: int) -> None:
    x = np.random.default_rng(1).normal(0, 1, (19, INPUTS)).astype(np.float32)
    alone = np.concatenate([product(kind, x[m : m + 1]) for m in range(len(x))])
    for count in range(2, len(x) + 1):
        assert np.array_equal(product(kind, x[:count]), alone[:count])


@pytest.mark.parametrize("kind", [Q4_0, Q8_0])
def test_an_odd_number_of_blocks_is_padded(kind: int) -> None:
    x = np.zeros((2, 128), np.float32)
    x[:, :96] = np.random.default_rng(2).normal(0, 1, (2, 96))
    exact = in_16_bits(x)[:, :96].astype(np.float64) @ weights(kind, 96)[1].T.astype(np.float64)
    assert np.abs(product(kind, x, 96) - exact).max() < 1e-6 * np.abs(exact).max()


# By instruction set: architecture, processor and features, as LLVM names them.
SETS = {
    "avx512": ("x86_64", "sapphirerapids", "+avx512bw,+avx512vnni,+fast-dpwssd"),
    "avx2": ("x86_64", "haswell", "+avx2,+fma,+f16c"),
    "neon": ("aarch64", "neoverse-n1", ""),
}


def in_a_process(text: str, name: str, *arguments: object) -> str:
    """Runs Python code where the processor is of one of SETS; returns what it prints."""
    _, cpu, features = SETS[name]
    env = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    done = python("-c", text, *arguments, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def digest() -> str:
    x = np.random.default_rng(3).normal(0, 1, (7, INPUTS)).astype(np.float32)
    return np.concatenate([product(kind, x) for kind in (Q4_1, Q8_0)]).tobytes().hex()


def test_avx2_gives_the_bits_of_this_processor() -> None:
    if packed.HOST not in ("avx512", "avx2"):
        pytest.skip("this processor has no AVX2")
    text = "from tests.engine import test_packed as t; print(t.packed.HOST, t.digest())"
    assert in_a_process(text, "avx2").split() == ["avx2", digest()]


def test_rounded_inputs_are_held_until_the_last_output() -> None:
    """glibc overwrites freed memory here, as another thread's product does."""
    text = "from tests.engine import test_packed as t; print(t.digest())"
    done = python("-c", text, env=os.environ | {"MALLOC_PERTURB_": "165"})
    assert done.stdout.strip() == digest()


def test_numba_s_switch_turns_avx_off() -> None:
    text = "from mpissd.engine.model.transformer.numba_ops.tiles import HOST; print(HOST)"
    host = python("-c", text, env=os.environ | {"NUMBA_ENABLE_AVX": "0"})
    assert host.stdout.split() in (["sse"], ["neon"])


COMPILE = """
import sys
from llvmlite import binding, ir
arch, cpu, features, kind, rows = sys.argv[1:]
triple, own = f"{arch}-unknown-linux-gnu", binding.get_process_triple
binding.get_process_triple = lambda: triple
from mpissd.engine.model.transformer.numba_ops import tiles
binding.get_process_triple = own
from mpissd.engine.model.transformer.numba_ops import packed
module = ir.Module()
module.triple = triple
packed.kernel(module, int(kind), int(rows)).linkage = "external"
binding.initialize_all_targets()
binding.initialize_all_asmprinters()
target = binding.Target.from_triple(triple)
machine = target.create_target_machine(cpu=cpu, opt=3, features=features)
parsed = binding.parse_assembly(str(module))
passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(3))
passes.getModulePassManager().run(parsed, passes)
print(packed.HOST)
print(machine.emit_assembly(parsed))
"""
SPILL = re.compile(r"^\s*(vmov\w+\s+%[xyz]mm\d+, .*\(%rsp\)|st[rp]\s+q.*\[sp)")


@pytest.mark.parametrize(("name", "rows"), [("avx512", 8), ("avx2", 5), ("neon", 6)])
@pytest.mark.parametrize("kind", [Q4_1, Q8_0])
def test_the_sums_of_a_tile_stay_in_registers(name: str, rows: int, kind: int) -> None:
    """On AVX2 those of integers: the float sums may leave them once for each group."""
    host, _, code = in_a_process(COMPILE, name, *SETS[name], kind, rows).partition("\n")
    assert host == name and "packed_" in code
    spills = [line for line in code.splitlines() if SPILL.match(line)]
    assert len(spills) <= (rows + 1 if name == "avx2" else 0), spills
