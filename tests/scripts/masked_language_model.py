"""The C# example: a language model that computes its own loss, exported for training."""

import onnx
import onnxruntime.training.artifacts as artifacts
import torch
import torch_says

from zoo import EncoderLayer


class MaskedLanguageModel(torch.nn.Module):
    def __init__(self, vocabulary=200, width=32, layers=2):
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(vocabulary, width)
        self.token_type_embeddings = torch.nn.Embedding(2, width)
        self.position_embeddings = torch.nn.Embedding(80, width)
        self.layer_norm = torch.nn.LayerNorm(width)
        self.layers = torch.nn.ModuleList(EncoderLayer(width, 4) for _ in range(layers))
        self.decoder = torch.nn.Linear(width, vocabulary)
        self.register_buffer("position_ids", torch.arange(80).unsqueeze(0))

    def forward(self, input_ids, attention_mask, token_type_ids):
        hidden = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        hidden = hidden + self.position_embeddings(self.position_ids[:, : input_ids.shape[1]])
        hidden = self.layer_norm(hidden) * attention_mask.unsqueeze(-1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.decoder(hidden)


class WithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, token_type_ids, labels):
        logits = self.model(input_ids, attention_mask, token_type_ids)
        loss = torch.nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100
        )
        return loss, logits


torch.manual_seed(3)
model = WithLoss(MaskedLanguageModel())
ids = torch.randint(0, 200, (4, 80))
mask, types = torch.ones(4, 80, dtype=torch.int64), torch.zeros(4, 80, dtype=torch.int64)
mask[:, 60:] = 0
labels = torch.where(torch.rand(4, 80) < 0.15, ids, -100)
names = ["input_ids", "attention_mask", "token_type_ids", "labels"]
torch.onnx.export(
    model,
    (ids, mask, types, labels),
    "mlm.onnx",
    input_names=names,
    output_names=["loss", "logits"],
    dynamic_axes={name: {0: "batch"} for name in [*names, "logits"]},
    opset_version=15,
    do_constant_folding=False,
    training=torch.onnx.TrainingMode.TRAINING,
    dynamo=False,
)

artifacts.generate_artifacts(
    onnx.load("mlm.onnx"),
    requires_grad=[name for name, _ in model.named_parameters()],
    frozen_params=[name for name, _ in model.named_buffers()],
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory=".",
)

loss, _ = model(ids, mask, types, labels)
torch_says.save(
    model, loss, input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels
)
