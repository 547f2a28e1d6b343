"""Weights of files and of recipes: they are read as they were written, for every format and every
part. Names of the hub are fetched once into its cache. Files that cannot be used are refused in one
line, before a tensor is read."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mpissd.common import token_lists
from mpissd.common.config import parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of, has_weights, resolve_model
from mpissd.engine.job import resolve
from mpissd.engine.model.transformer import checkpoint
from mpissd.engine.model.transformer.checkpoint import Checkpoint, tensors
from mpissd.engine.model.transformer.config import Llama3Scaling
from mpissd.engine.model.transformer.sources import (
    check_vocabularies,
    config_of,
    fetch_missing,
    open_checkpoint,
)
from mpissd.learn.export import quantized
from tests.transformer_reference import logits
from tests.weight_files import CONFIG, random_folder, refused, values_of, write_folder, write_gguf

Values = dict[str, np.ndarray]
# Logits as transformers computes them from the same folders.
REFERENCE = json.loads(Path(__file__).with_name("reference").joinpath("families.json").read_text())


def assert_holds(checkpoint: Checkpoint, values: Values, allowed: float = 0.0) -> None:
    told = dict(tensors(checkpoint.config))
    assert set(told) == set(values)
    for name, value in values.items():
        found = checkpoint.read(name)
        assert found.dtype == np.float32 and found.shape == value.shape
        assert np.abs(found - value).max() <= allowed * np.abs(value).max(), name


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_its_values_and_the_librarys_logits(tmp_path: Path, family: str) -> None:
    """Random weights of seed 1, 40 tokens; transformers' float32 differs by 3e-6 of 4."""
    shards = 3 if family == "tied" else 1
    folder, values = random_folder(tmp_path / "model", 1, shards, **FAMILIES[family])
    opened = open_checkpoint(str(folder))
    assert_holds(opened, values)
    told = opened.config
    expected = family == "qwen2", family == "qwen3", family == "tied"
    assert (told.qkv_bias, told.qk_norm, told.tied) == expected
    assert has_weights(str(folder)) and files_of(str(folder)) == folder
    found, wanted = logits(opened, REFERENCE["tokens"]), REFERENCE["logits"][family]
    assert found.argmax(-1).tolist() == wanted["argmax"]
    np.testing.assert_allclose(found[-1, :8], wanted["last"], atol=5e-5)


def write_bfloat16(path: Path, values: Values) -> None:
    """NumPy has no such type, and so the library writes none from it."""
    header, data = {}, b""
    for name, value in values.items():
        raw = (value.view(np.uint32) >> 16).astype("<u2").tobytes()
        where = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": value.shape, "data_offsets": where}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Checkpoint, Values]]:
    """One model in every format, with its values as they were before."""
    home = tmp_path_factory.mktemp("sources")
    folder, values = random_folder(home / "float32", 5)
    ours = {**CONFIG, "mpissd": {"quantization": "int8-32"}}
    paths = {
        "float32": folder,
        "int8-32": write_folder(home / "int8", ours, quantized(values, np.arange(50))),
        "bfloat16": write_folder(home / "bfloat16", CONFIG, {}),
        "gguf F32": write_gguf(home / "f32.gguf", values),
        "gguf Q8_0": write_gguf(home / "q8.gguf", values, "Q8_0"),
        "gguf Q4_1": write_gguf(home / "q4.gguf", values, "Q4_1"),
    }
    write_bfloat16(paths["bfloat16"] / "model.safetensors", values)
    every = {kind: (open_checkpoint(str(path)), values) for kind, path in paths.items()}
    recipe = open_checkpoint(
        "gen:layers=2,hidden=24,ffn=40,heads=4,kv_heads=2,head_dim=6,vocab=50", 3
    )
    return {**every, "random": (recipe, values_of(recipe))}


ALLOWED = {"float32": 0.0, "gguf F32": 0.0, "int8-32": 0.005, "gguf Q8_0": 0.005, "gguf Q4_1": 0.1}
ALLOWED["bfloat16"] = 2.0**-7  # cut off, not rounded


@pytest.mark.parametrize("kind", ALLOWED)
def test_every_format_is_read(sources: dict[str, tuple[Checkpoint, Values]], kind: str) -> None:
    assert_holds(*sources[kind], ALLOWED[kind])


@given(kind=st.sampled_from(sorted([*ALLOWED, "random"])), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_part_of_a_file_is_cut_from_the_whole(
    sources: dict[str, tuple[Checkpoint, Values]], kind: str, data: st.DataObject
) -> None:
    checkpoint, values = sources[kind]
    name = data.draw(st.sampled_from(sorted(values)))
    cuts = []
    for size in values[name].shape:
        start = data.draw(st.integers(0, size - 1))
        cuts.append(slice(start, data.draw(st.integers(start + 1, size))))
    part = checkpoint.read(name, *cuts)
    assert np.array_equal(part, checkpoint.read(name)[tuple(cuts)])
    if kind == "random" and len(cuts) == 2:
        spec = checkpoint.part(name, *cuts).recipe()
        assert spec is not None and np.array_equal(spec.values().T, part)


@pytest.mark.parametrize("kind", ALLOWED)
def test_blocks_are_as_stored(sources: dict[str, tuple[Checkpoint, Values]], kind: str) -> None:
    checkpoint, name = sources[kind][0], "model.layers.0.mlp.up_proj.weight"
    rows, columns = slice(3, 40), slice(32, 64)
    part = checkpoint.part(name, rows, columns).blocks()
    bits = {"int8-32": 8.5, "gguf Q8_0": 8.5, "gguf Q4_1": 5}.get(kind)
    assert (part is None) == (bits is None) and checkpoint.config.bits == (bits or 16)
    if part is not None:
        ggml_type, blocks = part
        assert blocks.shape[:2] == (37, 1)
        values = gguf.quants.dequantize(blocks[:, 0], gguf.GGMLQuantizationType(ggml_type))
        assert np.array_equal(values, checkpoint.read(name, rows, columns))
        assert checkpoint.part(name, rows, slice(8, 40)).blocks() is None  # no whole block


def test_the_llama_3_scaling_of_a_gguf_is_found_in_its_factors(tmp_path: Path) -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    path, values = random_folder(tmp_path / "scaled", rope_theta=5e5, rope_scaling=scaling)
    folder, config = str(path), json.loads((path / "config.json").read_text())
    scaled = config_of(folder)
    assert scaled.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    write_folder(tmp_path / "scaled", {**config, "rope_scaling": None}, values)
    factors = config_of(folder).frequencies() / scaled.frequencies()
    assert factors.max() == 8
    metadata = {"rope.freq_base": 5e5}
    more = {**values, "rope_freqs.weight": factors.astype(np.float32)}
    path = write_gguf(tmp_path / "m.gguf", more, metadata=metadata)
    assert np.allclose(config_of(str(path)).frequencies(), scaled.frequencies(), rtol=1e-6)
    more["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "other.gguf", more, metadata=metadata)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not supported"):
        config_of(str(path))


def test_a_digest_is_the_one_that_sha256sum_prints(tmp_path: Path) -> None:
    one, _ = random_folder(tmp_path / "one")
    data = (one / "model.safetensors").read_bytes()
    assert open_checkpoint(str(one)).sha256 == hashlib.sha256(data).hexdigest()
    many, _ = random_folder(tmp_path / "many", shards=2)
    listed = subprocess.run(
        "sha256sum *.safetensors", shell=True, cwd=many, capture_output=True, check=True, timeout=30
    )
    assert open_checkpoint(str(many)).sha256 == hashlib.sha256(listed.stdout).hexdigest()


def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, head, block = 100_000, 4096, 256
    for name, value in (("LARGEST", size - 1), ("_HEAD", head), ("_SAMPLE", block)):
        monkeypatch.setattr(checkpoint, name, value)

    def found(name: str, data: bytes) -> tuple[str, str]:
        (tmp_path / name).write_bytes(data)
        return checkpoint.digest([tmp_path / name])

    data, between = np.random.default_rng(0).bytes(size), head + block
    wanted = found("model", data)
    assert wanted[1] == checkpoint.SAMPLED != found("small", data[:-1])[1]
    others = {
        "longer": data + b"\0",
        "header": data[:100] + b"\xff\xff" + data[102:],
        "end": data[:-1] + bytes([data[-1] ^ 1]),
        "one layer in sixty": data[:50_000] + bytes(size // 60) + data[50_000 + size // 60 :],
    }
    digests = {found(name, each)[0] for name, each in others.items()}
    assert len({wanted[0], *digests}) == len(others) + 1
    # Bytes between the head and the first block are not covered.
    assert found("between", data[:between] + b"\0\0" + data[between + 2 :]) == wanted


def test_a_tied_head_is_the_embedding_and_depth_changes_no_layer() -> None:
    cut = open_checkpoint("1b@1L")
    assert cut.config.tied and cut.config.shape.num_layers == 1
    part = slice(5, 9), slice(0, 7)
    embedding = cut.read("model.embed_tokens.weight", *part)
    assert np.array_equal(cut.read("lm_head.weight", *part), embedding)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(cut.read(name, *part), open_checkpoint("1b").read(name, *part))


NAME = "owner/tiny-model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_fetch_happens_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, **how: Any) -> None:
        """Writes a snapshot as the library does."""
        asked.append(name)
        folder = cache / "models--owner--tiny-model"
        random_folder(folder / "snapshots" / "abc")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetch_missing(f"{NAME}/{NAME}", None, "toy-target", str(tmp_path))
    fetch_missing(None, NAME)
    assert asked == [NAME]
    assert resolve_model(NAME).hidden == config_of(NAME).shape.hidden == CONFIG["hidden_size"]


def test_no_network_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, **how: Any) -> None:
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    for pair, model in ((None, "owner/absent"), ("toy-target/owner/absent", None)):
        with pytest.raises(ConfigError) as error:
            fetch_missing(pair, model)
        told = "owner/absent is not on this machine and cannot be fetched (no route to the hub): "
        assert str(error.value).startswith(told) and "\n" not in str(error.value)
        assert "--target=FOLDER" in str(error.value)


def test_paths_are_no_names(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path has the form OWNER/NAME, too."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "cut.gguf").write_bytes(b"GGUF")
    fetch_missing(None, "weights/cut.gguf")
    with pytest.raises(ConfigError, match=r"weights/cut\.gguf'.* cut off"):
        resolve_model("weights/cut.gguf")


ANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a good model, as the folder `one` and as `good.gguf`."""
    home = tmp_path_factory.mktemp("bad")
    write_gguf(home / "good.gguf", random_folder(home / "one")[1], "Q8_0")
    return home


def copied(home: Path) -> tuple[Path, Path]:
    """A copy of the folder, and the file of its weights."""
    shutil.copytree(home / "one", home / "copy", dirs_exist_ok=True)
    return home / "copy", home / "copy" / "model.safetensors"


@ANY
@given(data=st.data())
def test_a_cut_file_is_refused(home: Path, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        folder, path = copied(home)
        whole = path.read_bytes()
    else:
        folder = path = home / "cut.gguf"
        whole = (home / "good.gguf").read_bytes()
    # The last bytes of a .gguf may be padding.
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 33))])
    told = refused(folder)
    assert any(word in told for word in ("damaged", "cut off", "no GGUF", "empty file")), told


@ANY
@given(at=st.floats(0, 1), value=st.binary(min_size=1, max_size=9), kind=st.sampled_from("sg"))
def test_a_damaged_header_is_refused_or_harmless(
    home: Path, at: float, value: bytes, kind: str
) -> None:
    folder, path = copied(home)
    whole = bytearray((home / "good.gguf" if kind == "g" else path).read_bytes())
    start = int(at * 3000)
    whole[start : start + len(value)] = value
    if kind == "g":
        folder = path = home / "damaged.gguf"
    path.write_bytes(whole)
    try:
        checkpoint = open_checkpoint(str(folder))
        for name, size in tensors(checkpoint.config):
            assert checkpoint.read(name).shape == size
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lm_head.weight", None, "the tensor lm_head.weight is missing"),
        ("model.norm.weight", np.ones(63, "f4"), "model.norm.weight is [63]: allowed: [64]"),
        ("lm_head.weight", np.ones((50, 64), "f8"), "lm_head.weight is F64: allowed: F32, F16"),
        ("head_ids", np.arange(50), "head_ids is I64: allowed: I32"),
        ("model.norm.weight", np.ones(64, "i1"), "model.norm.weight is I8: allowed: of a matrix"),
    ],
)
def test_tensors_fit_the_config(home: Path, name: str, value: np.ndarray | None, told: str) -> None:
    values = load_file(home / "one" / "model.safetensors")
    changed = {key: each for key, each in {**values, name: value}.items() if each is not None}
    refused(write_folder(home / "unfit", CONFIG, changed), told)
    if name not in ("lm_head.weight", "head_ids") and (
        value is None or value.dtype != "i1"
    ):  # a .gguf without an LM head is tied
        refused(write_gguf(home / "unfit.gguf", changed), name.partition(".")[0])


def test_mask_tokens_of_a_parallel_draft(home: Path) -> None:
    values = load_file(home / "one" / "model.safetensors")
    masks = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float16)
    with_masks = {**values, "mask_embedding.weight": masks}
    told = {**CONFIG, "mpissd": {"masks": 5}}
    opened = open_checkpoint(str(write_folder(home / "masks", told, with_masks)))
    assert opened.config.masks == 5 and opened.config.bits == 16
    assert np.array_equal(opened.table().read()[50:], masks)
    refused(write_folder(home / "masks", told, values), "tensor mask_embedding.weight is missing")
    with_masks["mask_embedding.weight"] = masks[:4]
    refused(write_folder(home / "masks", told, with_masks), "is [4, 64]: allowed: [5, 64]")
    nan = np.full_like(masks, np.nan)
    for damaged, said in ((nan, "a number that is not finite"), (masks.astype("i4"), "is I32")):
        with_masks["mask_embedding.weight"] = damaged
        refused(write_folder(home / "masks", told, with_masks), said)
    with_masks["mask_embedding.weight"] = masks
    refused(write_folder(home / "masks", CONFIG, with_masks), "mask_embedding.weight' is not supp")


def test_a_missing_shard_and_a_broken_index(home: Path) -> None:
    folder, _ = random_folder(home / "lacking", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "names 'model-00002-of-00002.safetensors', which is not there")
    for index in ("{}", '{"weight_map": {"a": 3}}', "[" * 99_999):
        (folder / "model.safetensors.index.json").write_text(index)
        refused(folder, "is no index of safetensors")


def test_folders_without_weights(home: Path) -> None:
    folder = home / "empty"
    folder.mkdir()
    refused(folder, "config.json")
    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    refused(folder, "has no *.safetensors")
    refused(home / "no-such.gguf", "No such file")
    (home / "text.gguf").write_text("hello")
    refused(home / "text.gguf")


def test_a_ggml_type_that_the_library_lacks(home: Path) -> None:
    data = (home / "good.gguf").read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    (home / "odd.gguf").write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    refused(home / "odd.gguf", "self_attn.q_proj.weight is of ggml's type 99")


def write_tokens(path: Path, tokens: list[str], added: dict[str, int], rows: int = 50) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": rows}))
    return write_tokenizer(path, tokens, added)


def write_tokenizer(path: Path, tokens: list[str], added: dict[str, int]) -> Path:
    vocab = {token: number for number, token in enumerate(tokens)}
    told = [{"id": number, "content": token} for token, number in added.items()]
    text = {"model": {"vocab": {**vocab, **added}}, "added_tokens": told}
    (path / "tokenizer.json").write_text(json.dumps(text), "utf-8")
    return path


def test_equal_tokens_may_differ_in_padding_and_in_special_ones(tmp_path: Path) -> None:
    left = write_tokens(tmp_path / "left", ["a", "b", "c"], {"<end>": 3})
    right = write_tokens(tmp_path / "right", ["a", "b", "c"], {"<stop>": 5}, rows=64)
    check_vocabularies(str(left), str(right))
    longer = write_tokens(tmp_path / "longer", ["a", "b", "c", "d", "e"], {})
    with pytest.raises(ConfigError, match="vocabularies: 3 tokens in left and 5 in longer: allow"):
        check_vocabularies(str(left), str(longer))
    other = write_tokens(tmp_path / "other", ["a", "x", "c"], {})
    with pytest.raises(ConfigError, match="token 1 is 'b' in left and 'x' in other"):
        check_vocabularies(str(left), str(other))
    check_vocabularies(str(left), "8b")  # without files
    (right / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="50 tokens in left and 64 in right"):
        check_vocabularies(str(left), str(right))
    (other / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json' is damaged"):
        token_lists.tokens_of(other)


def test_pairs_that_cannot_run_are_refused_while_their_job_is_resolved(tmp_path: Path) -> None:
    def pair_refused(told: str, *names: str, tp: int = 1, memory: int | None = None) -> None:
        models = dict(
            zip(("target", "draft"), (str(tmp_path / name) for name in names), strict=True)
        )
        config = parse_flags({"mode": "sd", "workload": "text", "prompt_ids": "1,2", **models})
        with pytest.raises(ConfigError, match=told):
            resolve(config, tp, backend="numpy", memory_bytes=memory)

    for name, tokens in (("target", "abc"), ("draft", "xyz"), ("short", "abc")):
        folder, _ = random_folder(tmp_path / name)
        write_tokenizer(folder, list(tokens), {})
    pair_refused("unequal vocabularies: token 0 is 'a' in target and 'x' in dra", "target", "draft")
    pair_refused("tp=3 with .*: allowed: at most its 2 KV heads", "target", "target", tp=3)
    pair_refused("the device has 1.1 GB: use fewer layers", "target", "target", memory=1 << 30)
    (tmp_path / "short" / "model.safetensors").write_bytes(b"short")
    for names in (("target", "short"), ("short", "target")):
        pair_refused("model.safetensors' is damaged", *names)
