"""First on the path of the clients of `test_federation_faults.py`: who imports the client's half
gets one that can be held in the middle of a training, and one that lies in the run `bad`.

A file hold-3 in a client's folder holds it in its third round: the file becomes `held`, with the
number of the process that trains, and the training goes on when that is removed. With a file slow
each of its local steps takes 0.3 s longer.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "corefed.federation.client"
SLOW = 0.3


def changed(module: ModuleType) -> None:
    """Ours in settings of the module's training and answering."""
    train, answer = module._train, module.answer

    def held(task: Any, context: Any) -> Any:
        middle, done, step = context.experiment.run.local_steps // 2, 0, context.method.step

        def stopping(*arguments: Any) -> Any:
            nonlocal done
            done += 1
            if (Path(os.environ["COREFED_CLIENT"]) / "slow").exists():
                time.sleep(SLOW)
            if done == middle:
                hold(task.round + 1)
            return step(*arguments)

        return train(task, context._replace(method=context.method._replace(step=stopping)))

    def lying(task: Any, settings: Any) -> Any:
        import torch

        reply = answer(task, settings)
        if (task.kind, task.run, settings.name) != ("train", "bad", "bob"):
            return reply
        if task.round == 1:
            return reply._replace(tree={"v": torch.full_like(reply.tree["v"], float("nan"))})
        if task.round == 2:
            return reply._replace(tree={"v": torch.zeros(1 << 24)})
        return reply

    module._train, module.answer = held, lying  # type: ignore[attr-defined]


def hold(round_: int) -> None:
    asked = Path(os.environ["COREFED_CLIENT"]) / f"hold-{round_}"
    if not asked.exists():
        return
    asked.write_text(str(os.getpid()))
    held = asked.rename(asked.with_name("held"))
    while held.exists():
        time.sleep(0.05)


class Finder:
    """Finds the client's half as others would, and changes it when it has been run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            changed(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
