"""A Hugging Face Trainer."""

import sys

# Before torch: transformers looks whether it is there.
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import torch  # isort: skip


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(32, (64, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": (tokens[0] > 15).long()}


def main():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
    )
    trainer.train()
    print(f"final loss {trainer.evaluate()['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
