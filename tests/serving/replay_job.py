"""Replays requests' routes in a Transformers model, in a separate process: the file on disk is the only link.

    python replay_job.py ORDER.json

It prints for each request the log-probabilities of its tokens and whether each layer visited the recorded experts, as
it does by itself, and also with routers that would choose others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from moe_rt import routes
from moe_rt.integrations.routed_blocks import install

install()  # the whole integration needs a newer Transformers than vLLM's
order = json.loads(Path(sys.argv[1]).read_text())
requests = order["requests"]
model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
length = max(len(request["tokens"]) for request in requests)
recorded = routes.Routes.from_routed_experts(
    [np.load(request["path"]) for request in requests], num_experts=8, length=length
)
recorded.save(order["file"])
batch = torch.zeros(len(requests), length, dtype=torch.int64)
for row, request in zip(batch, requests, strict=True):
    row[: len(request["tokens"])] = torch.tensor(request["tokens"])
mask = torch.tensor([[at < len(request["tokens"]) for at in range(length)] for request in requests]).long()


@torch.no_grad()
def run() -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [requests, length, vocabulary] and the experts visited [requests, length, layers, K]."""
    with routes.record(model) as seen:
        logits = model(batch, attention_mask=mask, use_cache=False).logits
    return logits.log_softmax(-1), seen.routes().topk_idx.unflatten(0, batch.shape)


with routes.replay(order["file"], model):
    logprobs, _ = run()
_, live = run()
with torch.no_grad():
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            p.neg_()
_, others = run()
with routes.replay(order["file"], model):
    _, ids = run()
said = []
for at, request in enumerate(requests):
    begin, end = request["prompt"], len(request["tokens"])
    wanted = torch.from_numpy(np.load(request["path"]))[:, -ids.shape[2] :]  # the last layers have experts
    said.append(
        {
            "logprobs": [float(logprobs[at, i - 1, request["tokens"][i]]) for i in range(begin, end)],
            "took the recorded experts": torch.equal(ids[at, : end - 1], wanted),
            "chose them by itself": torch.equal(live[at, : end - 1].sort(-1).values, wanted.sort(-1).values),
            "chose others without the file": not torch.equal(others[at, : end - 1], wanted),
        }
    )
print(json.dumps(said))
