"""Compares tokenizers of random files with transformers and llama.cpp.

    LIBRARY tests/parity/vocabularies.py make OUT [--seed=0 --folders=400 --files=200]
    PYTHON tests/parity/vocabularies.py compare OUT

`make` needs transformers and cyllama (llama.cpp), and nothing of mpissd. It writes Hugging Face
folders and .gguf files, and with each the library's tokens and texts. `compare` reads them with
mpissd: each is equal, or refused in one line; exit code 1 if one is not.
"""

import json
import os
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers as train

TEXT = (
    "The quick brown fox jumps over the lazy dog. I'll say: it's 1234567 times 42, don't you "
    "think? Hello world! naïve café 日本語 😀\n\n    def f(x):\n\treturn x + 1\n user system tools "
) * 9
WORDS = (
    "hello,  world, don't, 12345, café, cafe\u0301, 日本, 😀, \n\n, \t, <mark>, <|im_end|>, </s>,"
)
WORDS += " <a>, ▁x, <unk>, ., ?!, X, Ünï, naïve, ab<|im_start|>cd, \u200d, ＡＢ, ﬁ"
NAMES = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<mark>", "<a>", "[MASK]", "<t> x"]
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MODEL = {"embedding_length": 32, "feed_forward_length": 32, "context_length": 64, "block_count": 1}
MODEL |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
MATRICES = "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down attn_norm ffn_norm"
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 5 %}{% break %}"
    "{% endif %}{% set ns.n = ns.n + 1 %}\n  {% if m.content is string %}[{{ ns.n }}] "
    "{{ m.content ~ (eos_token or '') }}{% else %}{{ m | tojson }}{% endif %}\n{% endfor %}"
    "{{ documents }} {{ tools | tojson(sort_keys=true, separators=(',', ':')) if tools }}",
    "{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson(true) }}"
    "{% elif m.content is none %}none{% elif m.content == '' %}{{ raise_exception('empty') }}"
    "{% else %}{{ m.get('reasoning_content', '-') }}{{ m.thinking }} {{ m['content'] }}</s>"
    "{% endif %}{% endfor %}{% for n in range(3) %}{{ 'ab' * n + '-' }}{% endfor %}",
)  # fmt: skip


def trained(r: Random) -> tokenizers.Tokenizer:
    """Trains a byte-level, SentencePiece-like, unigram or WordPiece tokenizer."""
    kind = r.choice(["bytes", "bytes", "spm", "spm", "unigram", "wordpiece"])
    options: dict[str, Any] = {"vocab_size": 150, "show_progress": False}
    special, scheme = ["<unk>", "<s>", "</s>"], r.choice(["first", "always", "never"])
    steps: list[Any] = [pre_tokenizers.Metaspace(prepend_scheme=scheme, split=r.random() < 0.5)]
    decoder: Any = decoders.Metaspace(prepend_scheme=scheme)
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE(ignore_merges=r.random() < 0.3))
        splits = [Regex(GPT4), Regex(r"\p{N}"), Regex(r"\s+")]
        steps = [pre_tokenizers.Split(each, "isolated") for each in splits if r.random() < 0.4]
        prefix, whole = r.random() < 0.3, r.random() < 0.6
        if r.random() < 0.3:
            steps = [pre_tokenizers.Split(Regex(QWEN), "isolated")]
            made.normalizer = normalizers.NFC()
            prefix = whole = False
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=whole))
        options |= {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "vocab_size": 330}
        decoder, trainer = decoders.ByteLevel(), train.BpeTrainer(**options)
    elif kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=r.random() < 0.5)
        steps, decoder = [pre_tokenizers.BertPreTokenizer()], decoders.WordPiece()
        trainer = train.WordPieceTrainer(**options, special_tokens=["[UNK]"])
    elif kind == "spm":
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trainer = train.BpeTrainer(**options, special_tokens=special)
    else:
        made = tokenizers.Tokenizer(models.Unigram())
        trainer = train.UnigramTrainer(**options, special_tokens=special, unk_token="<unk>")
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    made.decoder = decoder
    extra = [normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]
    if made.normalizer is None and r.random() < 0.3:
        made.normalizer = normalizers.Sequence([r.choice(extra)])
    made.train_from_iterator([TEXT], trainer)
    if kind == "spm" and r.random() < 0.7:  # bytes for what has no token, as Llama 2
        state = json.loads(made.to_str())
        for byte in range(256):
            vocab = state["model"]["vocab"]
            vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
        state["model"]["byte_fallback"] = True
        made = tokenizers.Tokenizer.from_str(json.dumps(state))
        start = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*start, decoders.Strip(" ", 1, 0)])
        if r.random() < 0.5:
            made.pre_tokenizer = pre_tokenizers.Sequence([])
            dummy = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            made.normalizer = normalizers.Sequence(dummy)
    return made


def added(r: Random, text: str) -> dict[str, Any]:
    """Returns an added token's flags, as files have them."""
    flags = ("single_word", "lstrip", "rstrip")
    token: dict[str, Any] = {flag: r.random() < 0.15 for flag in flags}
    return {"content": text, **token, "normalized": r.random() < 0.3, "special": r.random() < 0.7}


def write_folder(r: Random, folder: Path) -> None:
    """Writes tokenizer.json and random neighbour files."""
    folder.mkdir()
    files = dict[str, Any]()
    made = trained(r)
    made.add_tokens([AddedToken(**added(r, text)) for text in r.sample(NAMES, r.randrange(5))])
    if r.random() < 0.3:
        made.enable_truncation(r.randrange(3, 9))
    if r.random() < 0.2:
        made.enable_padding(length=20)
    present = [text for text in NAMES if made.token_to_id(text) is not None]
    if present and r.random() < 0.5:
        first = present[0]
        made.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, made.token_to_id(first))]
        )
    state, size = json.loads(made.to_str()), made.get_vocab_size()
    if r.random() < 0.2 and isinstance(vocab := state["model"]["vocab"], dict):  # ids with a gap
        for token in state["added_tokens"]:
            if token["id"] >= len(vocab):
                token["id"] += 8
    config: dict[str, Any] = {}
    for name in ("bos", "eos", "unk", "pad", "cls", "image"):
        if r.random() < 0.35:
            text = r.choice((present if name == "eos" else NAMES) or NAMES)
            token: Any = {"__type": "AddedToken", **added(r, text)}
            config[f"{name}_token"] = r.choice([text, text, token, None])
    rest = [text for text in NAMES if text not in present]
    decoder = {str(size + n): added(r, text) for n, text in enumerate(rest) if r.random() < 0.6}
    if r.random() < 0.5:
        same = {str(token.pop("id")): token for token in json.loads(made.to_str())["added_tokens"]}
        config["added_tokens_decoder"] = {**same, **decoder} if r.random() < 0.8 else decoder
    if r.random() < 0.3:
        numbers = {token["content"]: int(number) for number, token in decoder.items()}
        files["added_tokens.json"] = numbers
    more = r.choice([[], r.sample(NAMES, 2), {"audio_token": "<a>"}, None])
    config[r.choice(["additional_special_tokens", "extra_special_tokens"])] = more
    if r.random() < 0.3:
        special = {"bos_token": added(r, "<s>"), "pad_token": r.choice(NAMES)}
        files["special_tokens_map.json"] = special
    classes = ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast"]
    config["tokenizer_class"] = r.choice(
        [*classes, "LlamaTokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "BertTokenizer", None]
    )
    for key in ("legacy", "add_prefix_space", "add_bos_token", "split_special_tokens"):
        if r.random() < 0.2:
            config[key] = r.choice([True, False, None] if key != "split_special_tokens" else [True])
    if r.random() < 0.1:
        config["clean_up_tokenization_spaces"] = True
    template, other = r.choices(TEMPLATES, k=2)
    form = r.randrange(4)
    if form == 0:
        config["chat_template"] = template
    elif form == 1:
        pairs = [("default", template), ("tool_use", other)]
        config["chat_template"] = [{"name": name, "template": text} for name, text in pairs]
    else:
        (folder / "chat_template.jinja").write_text(template)
    if form == 3:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(other)
    family = r.choice(["llama", "llama", "llama", "mistral", "qwen2", "qwen3"])
    files |= {"config.json": {"model_type": family}, "tokenizer.json": state}
    if r.random() < 0.95:
        kept = {k: value for k, value in config.items() if value is not None or r.random() < 0.5}
        files["tokenizer_config.json"] = kept
    for name, keys in files.items():
        (folder / name).write_text(json.dumps(keys))


def text_of(r: Random) -> str:
    return r.choice(["", " ", ""]) + r.choice([" ", "", ". "]).join(
        r.choices(WORDS.split(","), k=r.randrange(9))
    )


def conversation(r: Random) -> dict[str, Any]:
    """Returns arguments of a chat template."""
    messages = []
    for n in range(r.randrange(1, 7)):
        message: dict[str, Any] = {"role": ["user", "assistant"][n % 2], "content": text_of(r)}
        if n % 2 and r.random() < 0.3:
            message["content"] = r.choice([None, ""])
            message["tool_calls"] = [{"function": {"name": "f", "arguments": {"é": [1, None]}}}]
        if r.random() < 0.2:
            message[r.choice(["thinking", "reasoning", "reasoning_content"])] = text_of(r)
        messages.append(message)
    tools = [{"type": "function", "function": {"name": "f", "b": 1, "a": "<é>"}}]
    continues = isinstance(messages[-1]["content"], str) and r.random() < 0.3
    return {"messages": messages, "tools": r.choice([[], tools]), "continues": continues}


def theirs_of_folder(folder: Path, r: Random) -> dict[str, Any]:
    """Returns transformers' tokens of texts and conversations, and texts of tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    result: dict[str, Any] = {"texts": [], "chats": [], "ids": []}
    for _ in range(8):
        text = text_of(r)
        result["texts"].append([text, tokenizer.encode(text)])
        ids = [r.randrange(len(tokenizer)) for _ in range(r.randrange(1, 9))]
        result["ids"].append([ids, tokenizer.decode(ids, skip_special_tokens=True)])
    for _ in range(3):
        chat = conversation(r)
        options = {"tools": chat["tools"] or None, "continue_final_message": chat["continues"]}
        try:
            tokens = tokenizer.apply_chat_template(
                chat["messages"], add_generation_prompt=not chat["continues"],
                return_dict=False, **options,
            )  # fmt: skip
        except Exception:  # noqa: BLE001  (a template's program)
            tokens = None
        result["chats"].append([chat, tokens])
    return result


def write_gguf(r: Random, path: Path) -> None:
    """Writes a byte-pair vocabulary, with keys absent at random, and a model of one layer."""
    import gguf

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], train.BpeTrainer(vocab_size=320, initial_alphabet=letters, show_progress=False)
    )
    state = json.loads(made.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    names = [*NAMES, "<|endoftext|>", "<|eot_id|>", "<|end|>", "<EOT>", "<|fim_pad|>", "<reponame>"]
    names += ["<|eom_id|>", "<PRE>", "<|file_sep|>", "<eos>", "<start_of_turn>", "<s> "]
    names = r.sample(names, r.randrange(10))
    kinds = [1] * len(tokens) + [r.choice([1, 2, 3, 3, 3, 4]) for _ in names]
    tokens += names
    own: dict[str, Any] = {"model": "gpt2", "tokens": tokens}
    own["pre"] = r.choice(["llama-bpe", "llama3", "qwen2", "smollm", "gpt-2", "default", None])
    own["token_type"] = kinds if r.random() < 0.8 else None
    own["merges"] = [" ".join(pair) for pair in state["merges"]]
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        own[f"{name}_token_id"] = r.randrange(len(tokens)) if r.random() < 0.5 else None
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        own[name] = r.random() < 0.5 if r.random() < 0.3 else None
    keys = {f"llama.{name}": value for name, value in MODEL.items()}
    keys |= {f"tokenizer.ggml.{name}": value for name, value in own.items()}
    writer = gguf.GGUFWriter(path, "llama")
    adders = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool}
    adders |= {int: writer.add_uint32, float: writer.add_float32}
    for name, value in keys.items():
        if value is not None:
            adders[type(value)](name, value)
    matrix = np.zeros((32, 32), np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.add_tensor("output_norm.weight", matrix[0])
    for name in MATRICES.split():
        writer.add_tensor(f"blk.0.{name}.weight", matrix[0] if "norm" in name else matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def theirs_of_file(path: Path, r: Random) -> dict[str, Any]:
    """Returns llama.cpp's tokens of texts, and the tokens that end an answer."""
    from cyllama.llama import llama_cpp

    model = llama_cpp.LlamaModel(path_model=str(path))  # which the vocabulary needs
    vocabulary = model.get_vocab()
    texts = [unicodedata.normalize("NFC", text_of(r)) for _ in range(12)]  # qwen2: as its own files
    tokens = [vocabulary.tokenize(text, True, True) if text else None for text in texts]
    ends = [i for i in range(vocabulary.n_vocab) if vocabulary.is_eog(i)]
    pairs = [[text, ids] for text, ids in zip(texts, tokens, strict=True) if text]
    return {"texts": pairs, "ends": ends, "chats": [], "ids": []}


def make(out: Path, seed: int = 0, folders: int = 400, files: int = 200) -> None:
    """Writes the files, and what the libraries make of them."""
    import transformers  # noqa: F401  (once for all children)
    from cyllama.llama import llama_cpp  # noqa: F401
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    for number in range(folders + files):
        r = Random(f"{seed} {number}")
        path = out / (f"f{number}" if number < folders else f"g{number}.gguf")
        write, theirs = write_folder, theirs_of_folder
        if number >= folders:
            write, theirs = write_gguf, theirs_of_file
        write(r, path)
        if not os.fork():  # llama.cpp aborts its process
            try:
                result = theirs(path, r)
            except Exception as error:  # noqa: BLE001  (what the library refuses)
                result = {"error": f"{type(error).__name__}: {error}"[:200]}
            Path(f"{path}.json").write_text(json.dumps(result))
            os._exit(0)
        if os.wait()[1]:
            Path(f"{path}.json").write_text(json.dumps({"error": "aborted"}))


def differences(path: Path, theirs: dict[str, Any], counts: Counter[str]) -> list[str]:
    """Returns what mpissd makes otherwise of a folder or file; raises ConfigError."""
    from mpissd.common.errors import ConfigError
    from mpissd.engine.text.answer import AnswerText
    from mpissd.engine.text.tokenizer import load_tokenizer

    ours = load_tokenizer(str(path))
    pairs = [(f"encode {text!r}", ours.encode(text), tokens) for text, tokens in theirs["texts"]]
    pairs += [(f"decode {ids}", ours.decode(ids), text) for ids, text in theirs["ids"]]
    for tokens, text in theirs["ids"]:
        prompt, answer = ours.decode(tokens[:3]), AnswerText(ours, [], (), tokens[:3])
        mine = "".join(map(answer.push, tokens[3:])) + answer.flush()
        if "\ufffd" not in text and text.startswith(prompt):
            pairs.append((f"answer {tokens}", mine, text[len(prompt) :]))
    if "ends" in theirs:
        pairs.append(("ends", sorted(ours.stop_ids), theirs["ends"]))
    for chat, tokens in theirs["chats"]:
        try:
            mine = ours.chat(**chat)
        except ConfigError as error:
            reason = str(error).replace(path.name, "FOLDER")[:60]
            counts[f"chats refused: {reason}" if tokens else "chats refused by both"] += 1
            continue
        counts["chats equal" if mine == tokens else "chats differing"] += 1
        pairs.append((f"chat {chat}", mine, tokens))
    return [f"{what}: {mine} instead of {its}" for what, mine, its in pairs if mine != its]


def compare(out: Path) -> None:
    """Prints the counts, and the differences; exits with 1 if there is one."""
    from mpissd.common.errors import ConfigError

    counts = Counter[str]()
    for record in sorted(out.glob("[fg]*.json")):
        path, theirs = record.with_suffix(""), json.loads(record.read_text())
        kind, found = "files" if path.suffix == ".gguf" else "folders", list[str]()
        outcome = "refused by the library" if "error" in theirs else "equal"
        try:
            found = [] if "error" in theirs else differences(path, theirs, counts)
        except ConfigError as error:
            outcome = "refused"
            found = [f"more than a line: {error}"] * ("\n" in str(error))
        counts[f"{kind} {'differing' if found else outcome}"] += 1
        for line in found[:2]:
            print(f"{path.name}: {line}")
    for name, count in sorted(counts.items()):
        print(f"vocabularies: {count} {name}")
    sys.exit(any("differing" in key for key in counts))


if __name__ == "__main__":
    what, place, *words = sys.argv[1:]
    pairs = (word.removeprefix("--").split("=") for word in words)
    {"make": make, "compare": compare}[what](Path(place), **{name: int(n) for name, n in pairs})
