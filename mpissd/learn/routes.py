"""`python -m mpissd router`: fits the router of a folder of drafts by task of prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, flag, integer, words


@dataclass(frozen=True)
class RouterConfig(Checked):
    """Flags of `router`: a draft's folder, and prompts of each task."""

    target: str = flag("", words, "the target, whose tokenizer reads the prompts")
    draft: str = flag("", words, "folder of the draft for everything; a task's is in DRAFT/KIND")
    prompts: str = flag(
        "",
        words,
        "prompts by task, chat=FILE,…;code=FILE,…: people's (.jsonl) or recordings (.npz)",
    )
    folds: int = flag(5, integer(2), "parts of the prompts, each judged by a router of the others")

    @property
    def files(self) -> dict[str, str]:
        """The files of each task, a comma between."""
        return dict(part.strip().split("=", 1) for part in self.prompts.split(";"))

    def check_names(self) -> None:
        """Refuses a command without a target or a draft, and prompts of no or of one task."""
        for name in ("target", "draft", "prompts"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: needed")
        parts = [part.strip().partition("=") for part in self.prompts.split(";")]
        tasks = [task for task, _, files in parts if task.isidentifier() and files]
        if len(set(tasks)) < max(2, len(parts)):
            told = "two tasks or more, each once: chat=FILE,…;code=FILE,…"
            raise ConfigError(f"prompts={self.prompts}: allowed: {told}")


def router(config: RouterConfig) -> int:
    """Fits and writes the router, and prints how often it is right on prompts that it has not
    seen; returns the exit code.

    The last line is JSON: `accuracy`, and `confusion` as {true task: {chosen task: prompts}}.
    """
    from mpissd.common.presets import files_of
    from mpissd.engine.model.transformer.sources import config_of
    from mpissd.engine.spec.router import fit, held_out
    from mpissd.engine.workload.text.tokenizer import load_tokenizer
    from mpissd.learn.asked import read_exams

    folder, where = Path(config.draft), files_of(config.target)
    if not (folder / "config.json").is_file() or where is None:
        raise ConfigError(
            f"draft={config.draft}: allowed: the folder of a draft of {config.target}"
        )
    tokenizer, vocab = load_tokenizer(str(where)), config_of(config.target).shape.vocab_size
    prompts = {
        task: [
            prompt
            for exam in read_exams(files, tokenizer, vocab).values()
            for prompt in exam.prompts
        ]
        for task, files in config.files.items()
    }
    found = held_out(prompts, config.folds)
    fitted = fit(prompts)
    fitted.save(folder)
    right = sum(row[task] for task, row in found.items())
    count = sum(map(len, prompts.values()))
    own = [task for task in fitted.tasks if (folder / task / "config.json").is_file()]
    print(f"   prompts   {count}: " + ", ".join(f"{k} {len(p)}" for k, p in prompts.items()))
    print(f"   held out  {right / count:.4f} right, {config.folds} folds")
    print(f"   drafts    {', '.join(own) or 'none'} of {', '.join(fitted.tasks)} have one")
    print(json.dumps({"accuracy": round(right / count, 5), "confusion": found}))
    return 0
