"""Checkpoints: a run that was killed goes on as if it had not been; runs of one kind go on in
another; what is damaged is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from resumable import MAKE, OVERFLOWS, POLICY, Net, one_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, AdamW
from training import FLOAT16, Mlp, X, distance, overflow, same, scaled, snapshot

import amp_graph
from amp_graph import CheckpointError, StepCounts

HERE = Path(__file__).parent
STEPS = 14
LONG = 100  # so many that a victim is not done before the signal reaches it


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def started(folder: Path, kind: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "resumable.py"), str(folder), kind, str(LONG)]
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )


def final(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize("kind", MAKE)
def test_killed_at_a_random_step_and_resumed(kind: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    at = random.SystemRandom().randrange(STEPS)
    victim = started(killed, kind)
    assert victim.stdout is not None
    for line in victim.stdout:
        if line == f"step {at}\n":
            victim.send_signal(signal.SIGKILL)
            break
    assert victim.wait() == -signal.SIGKILL
    assert at <= final(killed)["step"] < LONG - 1
    for folder in (killed, whole):
        with started(folder, kind) as run:
            assert run.wait() == 0
    a, b = final(killed), final(whole)
    assert a["step"] == b["step"] == LONG - 1
    assert same(a, b), f"killed after step {at}"
    saved = a["optimizer"]["amp_graph"]
    assert (saved["steps"], saved["skipped"]) == (LONG, len(OVERFLOWS))
    assert saved["scales"][0]["scale"] == 2.0**12


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("at", [0, 2, 3, 8])
def test_saved_in_memory_and_resumed(kind: str, at: int) -> None:
    """Right after a skipped step as well, when no forward has ended the round yet."""
    model = Net()
    optimizer = MAKE[kind](model.parameters())
    amp_graph.convert(model, optimizer, policy=POLICY)
    for step in range(STEPS):
        one_step(model, optimizer, step)
        if step == at:
            saved = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], saved)
    torch._dynamo.reset()
    other = Net()
    resumed = MAKE[kind](other.parameters())
    amp_graph.convert(other, resumed, policy=POLICY)
    saved.seek(0)
    of_model, of_optimizer, random_state = torch.load(saved, weights_only=True)
    other.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    torch.set_rng_state(random_state)
    for step in range(at + 1, STEPS):
        one_step(other, resumed, step)
    assert same(other.state_dict(), model.state_dict())
    assert same(resumed.state_dict(), optimizer.state_dict())
    assert amp_graph.step_counts(resumed) == amp_graph.step_counts(optimizer)


def test_two_models_and_two_optimizers_resume() -> None:
    def made() -> tuple[list[nn.Module], list[Any]]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        models = [Mlp(outputs=4), Mlp()]
        both = [p for m in models for p in m.parameters()]
        optimizers = [SGD(both, lr=0.1, momentum=0.9), AdamW(models[1].parameters(), lr=0.01)]
        for model, its in zip(models, (optimizers[:1], optimizers), strict=True):
            amp_graph.convert(model, its, policy=scaled(2.0**10, growth_interval=2))
        return models, optimizers

    def run(models: list[nn.Module], optimizers: list[Any], steps: range) -> None:
        for step in steps:
            for model in models:
                model.zero_grad()
            models[1](models[0](X)).square().mean().backward()
            if step in (1, 4, 6):
                overflow(models[step == 4])
            for optimizer in optimizers:
                optimizer.step()

    whole, first, second = made(), made(), made()
    run(*whole, range(8))
    run(*first, range(3))
    for model, other in zip(first[0] + first[1], second[0] + second[1], strict=True):
        other.load_state_dict(copy.deepcopy(model.state_dict()))
    run(*second, range(3, 8))
    for a, b in zip(whole[0] + whole[1], second[0] + second[1], strict=True):
        assert same(a.state_dict(), b.state_dict())
    scales = [amp_graph.scale_of(m).get_scale() for m in whole[0]]
    assert scales == [amp_graph.scale_of(m).get_scale() for m in second[0]]
    assert len(set(scales)) == 2


class Trainer:
    """One script in three kinds: plain, autocast and GradScaler, converted."""

    def __init__(self, kind: str):
        torch.manual_seed(0)
        self.kind, self.model = kind, Mlp()
        self.optimizer = AdamW(self.model.parameters(), lr=0.02, eps=1e-3)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**10, growth_interval=3, enabled=kind == "autocast"
        )
        if kind == "converted":
            policy = scaled(2.0**10, growth_interval=3)
            amp_graph.convert(self.model, self.optimizer, policy=policy)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            low = self.kind == "autocast"
            around = torch.autocast("cpu", torch.float16) if low else contextlib.nullcontext()
            self.optimizer.zero_grad()
            with around:
                loss = (self.model(X).float() - 1).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self) -> dict[str, Any]:
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        if self.kind == "converted":
            checkpoint["scaler"] = amp_graph.scale_of(self.model).state_dict()
        return copy.deepcopy(checkpoint)

    def load(self, checkpoint: dict[str, Any]) -> None:
        assert self.model.load_state_dict(checkpoint["model"]) == ([], [])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["scaler"] and self.kind == "autocast":
            self.scaler.load_state_dict(checkpoint["scaler"])
        if checkpoint["scaler"] and self.kind == "converted":
            amp_graph.scale_of(self.model).load_state_dict(checkpoint["scaler"])


KINDS = ["plain", "autocast", "converted"]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_a_checkpoint_moves(first: str, second: str) -> None:
    before, stayed, moved = Trainer(first), Trainer("plain"), Trainer(second)
    before.train(4)
    checkpoint = before.save()
    assert list(checkpoint["model"]) == list(Mlp().state_dict())
    assert all(v.dtype is torch.float32 for v in checkpoint["model"].values())
    for trainer in (stayed, moved):
        trainer.load(copy.deepcopy(checkpoint))
    assert same(moved.model.state_dict(), checkpoint["model"])
    start = snapshot(moved.model)[0]
    for trainer in (stayed, moved):
        trainer.train(4)
    for p, q, s in zip(moved.model.parameters(), stayed.model.parameters(), start, strict=True):
        assert distance(p - s, q - s) <= 2 * FLOAT16  # four steps, each at slightly other weights
    if "plain" not in (first, second):
        state = moved.save()["scaler"]
        assert (state["scale"], state["_growth_tracker"]) == (2.0**12, 2), "eight steps in all"


def good_state() -> dict[str, Any]:
    trainer = Trainer("converted")
    trainer.train(2)
    return trainer.optimizer.state_dict()["amp_graph"]


SCALE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
DAMAGED: dict[str, Any] = {
    "empty": {},
    "a number": 3,
    "a list": [1, 2],
    "foreign": {"loss_scalers": {"scale": 1.0}, "version": 1},
    "no scales": {"scales": [], "steps": 1, "skipped": 0},
    "too many": {"scales": [SCALE | {"scale": 4.0}] * 2, "steps": 1, "skipped": 0},
    "steps missing": {"scales": [SCALE | {"scale": 4.0}], "skipped": 0},
    "steps no number": {"scales": [SCALE | {"scale": 4.0}], "steps": "many", "skipped": 0},
    "steps below zero": {"scales": [SCALE | {"scale": 4.0}], "steps": -1, "skipped": 0},
    "skipped not finite": {"scales": [SCALE | {"scale": 4.0}], "steps": 1, "skipped": math.nan},
    "more skipped than steps": {"scales": [SCALE | {"scale": 4.0}], "steps": 1, "skipped": 2},
    "truncated": {"scales": [SCALE], "steps": 1, "skipped": 0},
    "scale zero": {"scales": [SCALE | {"scale": 0.0}], "steps": 1, "skipped": 0},
    "scale nan": {"scales": [SCALE | {"scale": math.nan}], "steps": 1, "skipped": 0},
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_checkpoint_changes_nothing(damaged: Any) -> None:
    trainer, other = Trainer("converted"), Trainer("converted")
    trainer.train(5)
    other.train(2)
    state = copy.deepcopy(other.optimizer.state_dict()) | {"amp_graph": damaged}
    before = copy.deepcopy(trainer.save())
    with pytest.raises(CheckpointError):
        trainer.optimizer.load_state_dict(state)
    assert same(trainer.save(), before)
    assert amp_graph.step_counts(trainer.optimizer) == StepCounts(5, 0)
    trainer.train(1)


def test_a_state_that_the_optimizer_itself_refuses_changes_no_scale() -> None:
    trainer = Trainer("converted")
    trainer.train(2)
    before = copy.deepcopy(trainer.save())
    wrong = SGD([nn.Parameter(torch.ones(1))], lr=0.1).state_dict() | {"amp_graph": good_state()}
    wrong["amp_graph"]["scales"][0]["scale"] = 4.0
    with pytest.raises(ValueError, match="parameter group"):
        trainer.optimizer.load_state_dict(wrong)
    assert same(trainer.save(), before)


def test_an_optimizer_s_state_without_a_scale_leaves_it() -> None:
    trainer = Trainer("converted")
    trainer.train(3)
    plain = Trainer("plain")
    plain.train(1)
    trainer.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert amp_graph.scale_of(trainer.model).get_scale() == 2.0**11


def test_distributed_checkpoint(tmp_path: Path) -> None:
    """It takes what all optimizers have of a state; the scale is saved beside it."""
    trainer, resumed = Trainer("converted"), Trainer("converted")
    trainer.train(5)

    def parts(of: Trainer) -> dict[str, Any]:
        model, optimizer = get_state_dict(of.model, of.optimizer)
        return {"model": model, "optimizer": optimizer, "scale": amp_graph.scale_of(of.model)}

    dcp.save(parts(trainer), checkpoint_id=tmp_path, no_dist=True)
    loaded = parts(resumed)
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        resumed.model,
        resumed.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    trainer.train(2)
    resumed.train(2)
    ours, theirs = resumed.save(), trainer.save()
    assert same([ours["model"], ours["scaler"]], [theirs["model"], theirs["scaler"]])
