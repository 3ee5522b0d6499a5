"""Ten steps on fixed data, against the numbers they once gave.

A change that moves these has changed the model, the data order, the initial weights or the
optimizer. If it was meant to, print the new ones: `pytest tests/e2e/test_golden.py -s`. The text
and the tokenizer are fixed, so the numbers depend neither on the Python version nor (2.11 and 2.13
agree to six digits) on torch's.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from runs import curve, train_run
from text_in_memory import Ranks, only_source

from titanlite.config.load import load_config
from titanlite.config.schema import Config
from titanlite.data.prepared_manifest import read_manifest
from titanlite.data.rows import Windows
from titanlite.data.shards import Tokens
from titanlite.data.stream import TrainStream
from titanlite.model.flavors import resolve_flavor
from titanlite.model.llama import Llama
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.cache import prepare

GOLDEN = {  # step: (loss, gradient norm)
    1: (8.330174, 1.384981),
    2: (8.061898, 1.716351),
    3: (7.606133, 1.277371),
    4: (7.168353, 1.314454),
    5: (6.774899, 1.289762),
    6: (6.374144, 1.306593),
    7: (6.067117, 1.290269),
    8: (5.857737, 1.288744),
    9: (5.761134, 1.277682),
    10: (5.673761, 1.297429),
}


def test_ten_steps(pool, arguments, tmp_path):
    run = [*arguments, "--training.steps=10", "--optimizer.lr=1e-2"]
    assert pool.run(1, train_run, run) == [0]
    found = curve(tmp_path / "debug")
    print(
        "GOLDEN =",
        {step: tuple(round(value, 6) for value in values) for step, values in found.items()},
    )
    assert sorted(found) == sorted(GOLDEN)
    for step, values in GOLDEN.items():
        assert found[step] == pytest.approx(values, rel=2e-5), step


def bare_loop(config: Config) -> dict[int, tuple[float, float]]:
    """The same training in the plainest PyTorch: no sharding, no accumulation, a mean, a cosine
    written out.
    """
    training, tokenizer = config.training, Tokenizer()
    folder = prepare(config.data, tokenizer, lambda message: None)
    windows = Windows(Tokens(folder, read_manifest(folder), "train"), training.seq_len, "training")
    whole = dataclasses.replace(training, local_batch_size=training.global_batch_size)
    samples = only_source(windows, config.run.seed)
    stream = TrainStream(samples, whole, Ranks(), document_mask=False)
    model = Llama(resolve_flavor(config.model, tokenizer.size), training.seq_len)
    model.init_weights(config.run.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    found, warmup = {}, config.schedule.warmup_steps
    for step in range(training.steps):
        (batch,) = stream.next_step()
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, training.max_norm / norm)
        part = (step + 1 - warmup) / (training.steps - warmup)
        cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part))
        optimizer.param_groups[0]["lr"] = config.optimizer.lr * (
            cosine if step >= warmup else (step + 1) / warmup
        )
        optimizer.step()
        found[step + 1] = (float(loss), norm)
    return found


def test_training_equals_a_bare_loop(pool, arguments, tmp_path):
    run = [*arguments, "--training.steps=10", "--optimizer.lr=1e-2", "--training.max_norm=0.7"]
    (plain,) = pool.run(1, bare_loop, load_config(run))
    assert pool.run(2, train_run, run) == [0, 0]
    found = curve(tmp_path / "debug")
    for step, values in plain.items():
        assert found[step] == pytest.approx(values, rel=1e-5), step
