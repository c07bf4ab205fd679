"""An mlp of experts that several ranks share out, with a capacity, in plain loops of float64: forward and gradients.

Written from the meaning of the plan's keys alone: each rank sends an expert the first C of its rows, in the order of
tokens; the others neither add to their tokens nor have a gradient.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define

F64 = npt.NDArray[np.float64]
Weights = dict[str, F64]
"""Of all experts, by the short names of parameters."""


@define
class Oracle:
    """One layer; `rows` of the log are (rank, token, choice, expert, kept)."""

    weights: Weights
    choices: int
    factor: float
    normalised: bool
    epsilon: float
    scale: float = 1.0
    balance: float = 0.0
    z: float = 0.0

    def forward(self, x: F64) -> tuple[F64, dict[str, Any]]:
        """Output of one rank's tokens [T, h], and what the backward needs."""
        tokens, experts = len(x), len(self.weights["router_proj"])
        capacity = min(tokens, ceil(self.factor * tokens * self.choices / experts - 1e-9))
        r = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.epsilon)
        xn = x * r * self.weights["norm"]
        logits = xn @ self.weights["router_proj"].T
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        y, sent, rows = x.copy(), np.zeros(experts, int), []
        for t in range(tokens):
            chosen = sorted(np.argsort(-logits[t], kind="stable")[: self.choices].tolist())
            whole = shares[t, chosen].sum() if self.normalised else 1.0
            for e in chosen:
                weight, kept = shares[t, e] / whole, sent[e] < capacity
                sent[e] += 1
                rows.append((t, e, weight, kept))
                if kept:
                    y[t] += self.scale * weight * (self._act(xn[t], e) @ self.weights["down_experts"][e].T)
        return y, {"x": x, "r": r, "xn": xn, "logits": logits, "shares": shares, "rows": rows, "sent": sent}

    def _act(self, row: F64, e: int) -> F64:
        gate, up = (self.weights[f"{name}_experts"][e] @ row for name in ("gate", "up"))
        product: F64 = gate / (1 + np.exp(-gate)) * up
        return product

    def backward(self, made: dict[str, Any], dy: F64) -> tuple[F64, Weights]:
        """Gradients of one rank's input, and of all weights by its tokens."""
        w, grads = self.weights, {name: np.zeros_like(each) for name, each in self.weights.items()}
        xn, logits, shares = made["xn"], made["logits"], made["shares"]
        dxn, dlogits = np.zeros_like(xn), np.zeros_like(logits)
        of_weights: dict[int, list[tuple[int, float, float]]] = {}
        for t, e, weight, kept in made["rows"]:
            above = self.scale * dy[t]
            gate, up = (w[f"{name}_experts"][e] @ xn[t] for name in ("gate", "up"))
            s = 1 / (1 + np.exp(-gate))
            act = gate * s * up
            of_weights.setdefault(t, []).append((e, weight, float(above @ w["down_experts"][e] @ act) if kept else 0.0))
            if kept:
                dact = weight * (above @ w["down_experts"][e])
                dgate, dup = dact * up * s * (1 + gate * (1 - s)), dact * gate * s
                grads["down_experts"][e] += np.outer(above, weight * act)
                grads["gate_experts"][e] += np.outer(dgate, xn[t])
                grads["up_experts"][e] += np.outer(dup, xn[t])
                dxn[t] += dgate @ w["gate_experts"][e] + dup @ w["up_experts"][e]
        tokens, experts = logits.shape
        pull = self.balance * experts / (self.choices * tokens**2) * made["sent"]
        for t, chosen in of_weights.items():
            mean = sum(weight * dweight for _, weight, dweight in chosen)
            if not self.normalised:
                dlogits[t] -= shares[t] * mean
            for e, weight, dweight in chosen:
                dlogits[t, e] += weight * (dweight - (mean if self.normalised else 0.0))
            dlogits[t] += shares[t] * (pull - shares[t] @ pull)
            log_sum = np.log(np.exp(logits[t]).sum())
            dlogits[t] += 2 * self.z / tokens * log_sum * shares[t]
        grads["router_proj"] += dlogits.T @ xn
        dxn += dlogits @ w["router_proj"]
        x, r = made["x"], made["r"]
        grads["norm"] += (dxn * x * r).sum(axis=0)
        inner = dxn * w["norm"]
        dx = r * inner - x * r**3 * (inner * x).mean(axis=1, keepdims=True)
        return dx + dy, grads
