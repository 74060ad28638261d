"""A byte-level GPT: a decoder-only transformer that predicts the next byte, and its loss."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayway import Loss

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention: a position sees itself and those before it."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, length, width) to the same shape."""
        rows, length, width = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


class Block(nn.Module):
    """Attention, then a feed-forward layer; each normalises its input and adds to the stream."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads=heads, dropout=dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_up = nn.Linear(width, 4 * width)
        self.feed_down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, length, width) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = functional.gelu(self.feed_up(self.feed_norm(x)))
        out: Tensor = x + self.dropout(self.feed_down(hidden))
        return out


class GPT(nn.Module):
    """A stack of blocks between an embedding and a head that share one weight."""

    def __init__(
        self, *, seq_len: int, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(seq_len, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads=heads, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embed.weight
        self._initialise(layers)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes (rows, length <= seq_len) to scores of each next byte (rows, length, 256).

        Raises:
            ValueError: The text is longer than ``seq_len``.
        """
        length = text.shape[1]
        if length > self.seq_len:
            raise ValueError(
                f"the text has {length} bytes to predict from, and the model looks back on seq_len="
                f"{self.seq_len}. Use seq_len={length}, or data with shorter rows."
            )
        places = torch.arange(length, device=text.device)
        x = self.dropout(self.embed(text.long()) + self.position(places))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores

    def _initialise(self, layers: int) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                # 2 x layers branches add up in the stream: keep its size that of one.
                is_branch_end = name.endswith(("attention.out.weight", "feed_down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers if is_branch_end else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)


def build(
    *, seq_len: int = 128, width: int = 128, layers: int = 4, heads: int = 4, dropout: float = 0.0
) -> GPT:
    """Return an untrained model; 842,496 parameters as it stands.

    Args:
        seq_len: Most bytes the model looks back on.
        width: Numbers that stand for a position between the blocks.
        layers: Blocks.
        heads: Attention heads a block; must divide ``width``.
        dropout: Part of the numbers set to 0 in training, 0 to 1. With more than 0, the weights
            depend on how the global batch is cut.
    """
    return GPT(seq_len=seq_len, width=width, layers=layers, heads=heads, dropout=dropout)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Sum the cross-entropy, in nats, of each byte of ``text`` (rows, length) but the first."""
    text = batch["text"].long()
    seen, following = text[:, :-1], text[:, 1:].flatten()
    scores = model(seen).flatten(0, 1).float()
    nats = functional.cross_entropy(scores, following, reduction="sum")
    correct = (scores.detach().argmax(dim=1) == following).sum()
    predicted = following.numel()
    return Loss(
        sum=nats,
        weight=predicted,
        metrics={
            "bits_per_byte": (nats.detach() / math.log(2), predicted),
            "accuracy": (correct, predicted),
        },
    )
