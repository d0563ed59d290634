"""Truncated backpropagation through time: the hidden state is carried and detached."""

import torch
from torch import nn


class CharacterModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.rnn = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, 12)

    def forward(self, tokens, hidden=None):
        outputs, hidden = self.rnn(self.embed(tokens), hidden)
        return self.out(outputs), hidden


def repackage(hidden):
    return tuple(h.detach() for h in hidden)


torch.manual_seed(0)
text = torch.tensor([1, 4, 9, 4, 2, 7, 3, 3]).repeat(20)[: 4 * 37].view(4, 37)
model = CharacterModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    hidden = None
    for start in range(0, 36, 6):
        logits, hidden = model(text[:, start : start + 6], hidden)
        target = text[:, start + 1 : start + 7]
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hidden = repackage(hidden)
    print(f"epoch {epoch} hidden {hidden[0].dtype} loss {loss.item():.4f}")
print(f"final loss {loss.item():.6f}")
