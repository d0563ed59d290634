"""A Lightning module and Trainer."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 4))
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, index):
        x, y = batch
        return self.loss(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("loss", self.loss(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    L.seed_everything(0, verbose=False)
    x = torch.randn(128, 20)
    data = TensorDataset(x, x[:, :4].argmax(1))
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, DataLoader(data, batch_size=32))
    trainer.validate(model, DataLoader(data, batch_size=64), verbose=False)
    print(f"final loss {trainer.callback_metrics['loss'].item():.6f}")


if __name__ == "__main__":
    main()
