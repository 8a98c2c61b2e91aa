"""Tutorial 3: fine-tune a small text encoder."""

# %% [markdown]
# # 3. Fine-tune text
#
# A small transformer reads text letter by letter. On the workstation it learns to classify six
# languages. On the device it is fine-tuned for three others: Danish, Finnish and Turkish. The text
# is that of Django's messages and their translations, which its wheel ships.
#
# ```sh
# pip install 'onnxtrain[offline,cli]' torch
# ```

# %%
import gettext
import io
import os
import subprocess
import sys
import textwrap
import zipfile
import zlib
from pathlib import Path

import numpy as np

LENGTH, LETTERS = 40, 384
wheels = Path(os.environ.get("ONNXTRAIN_MODELS", "wheels"))
if not list(wheels.glob("[dD]jango-*.whl")):
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(wheels), "django==5.2.19"], check=True)
archive = zipfile.ZipFile(next(wheels.glob("[dD]jango-*.whl")))


def messages(language: str) -> dict[str, str]:
    """Return the translations into a language, by original."""
    found = {}
    for name in archive.namelist():
        if name.endswith(f"/locale/{language}/LC_MESSAGES/django.mo"):
            catalog = gettext.GNUTranslations(io.BytesIO(archive.read(name)))._catalog
            found.update((k, v) for k, v in catalog.items() if isinstance(k, str) and k)
    return found


def encode(text: str) -> np.ndarray:
    """Return letters as numbers: 0 is padding, 1 is an unknown letter."""
    codes = [ord(letter) if ord(letter) < LETTERS else 1 for letter in text.lower()]
    return np.array((codes + [0] * LENGTH)[:LENGTH], np.int64)


def load(languages: list[str], test: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return lines of up to 40 letters; the split into training and test is by message."""
    texts, labels = [], []
    for label, language in enumerate(languages):
        for original, translated in messages(language).items():
            if (zlib.crc32(original.encode()) % 4 == 0) == test:
                lines = [s for s in textwrap.wrap(translated, LENGTH) if len(s) >= 12]
                texts += [encode(line) for line in lines]
                labels += [label] * len(lines)
    return np.stack(texts), np.array(labels)


known = ["de", "fr", "es", "it", "nl", "pl"]
train, test = load(known, test=False), load(known, test=True)
print(train[0].shape, test[0].shape)

# %% [markdown]
# ## The encoder
#
# An embedding, a convolution, one attention layer with residuals, and the mean over the letters.

# %%
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, classes: int, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.before = nn.Conv1d(width, width, 5, padding=2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.classifier = nn.Linear(width, classes)

    def attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        size = (-1, LENGTH, self.heads, self.width // self.heads)
        q, k, v = (
            part.reshape(size).transpose(1, 2)
            for part in self.query_key_value(x).split(self.width, dim=-1)
        )
        scores = q @ k.transpose(2, 3) / (self.width // self.heads) ** 0.5
        weights = torch.softmax(scores - 1e4 * (1 - mask[:, None, None]), dim=-1)
        return self.joined((weights @ v).transpose(1, 2).reshape(-1, LENGTH, self.width))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = (text > 0).float()
        x = self.letters(text) + self.places
        x = x + torch.relu(self.before(x.transpose(1, 2))).transpose(1, 2)
        x = x + self.attend(self.norm1(x), mask)
        x = x + self.narrow(torch.relu(self.wide(self.norm2(x))))
        mean = (x * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return self.classifier(mean)


torch.manual_seed(0)
torch.onnx.export(
    Encoder(len(known)).eval(),
    (torch.ones(2, LENGTH, dtype=torch.int64),),
    "encoder.onnx",
    input_names=["text"],
    output_names=["scores"],
    dynamic_axes={"text": {0: "batch"}, "scores": {0: "batch"}},
    dynamo=False,
)

# %% [markdown]
# ## Pretrain on the workstation
#
# onnxtrain trains from scratch as well.

# %%
import onnxtrain


def learn(session: onnxtrain.TrainingSession, data, unseen, epochs: int) -> onnxtrain.History:
    session.set_learning_rate(3e-3)
    schedule = {"name": "cosine", "warmup_ratio": 0.1}
    return onnxtrain.fit(
        session, data, epochs, validation=unseen, metrics=["accuracy"], schedule=schedule, seed=0
    )


optimizer = onnxtrain.optim.AdamW(weight_decay=0.01)
print(onnxtrain.prepare("encoder.onnx", "pretraining", optimizer=optimizer))
session = onnxtrain.TrainingSession("pretraining")
learn(session, train, test, epochs=4)
session.export_model_for_inferencing("pretrained.onnx", ["scores"])

# %% [markdown]
# ## Fine-tune on the device
#
# The user has 150 lines of each of three languages that the encoder has never seen.
# `replace_classifier` returns a model with a new last layer. Most of the encoder trains with it,
# because the embedding has never seen a Danish æ; the convolution and the positions stay frozen.

# %%
wanted = ["da", "fi", "tr"]
lines, labels = load(wanted, test=False)
chosen = np.concatenate([np.flatnonzero(labels == k)[:150] for k in range(3)])
few, unseen = (lines[chosen], labels[chosen]), load(wanted, test=True)

replaced = onnxtrain.replace_classifier("pretrained.onnx", len(wanted))
made = onnxtrain.prepare(
    replaced.model, "artifacts", freeze=["before.*", "places"], optimizer=optimizer
)
print(made.parameter_count, "parameters train,", sum(made.frozen.values()), "are frozen")
session = onnxtrain.TrainingSession("artifacts")
history = learn(session, few, unseen, epochs=8)
figure = history.plot("loss.png")

# %% [markdown]
# The exported model classifies new text:

# %%
import onnxruntime

session.export_model_for_inferencing("personal.onnx", ["scores"])
model = onnxruntime.InferenceSession("personal.onnx")
for line in (
    "Vælg en gyldig mulighed fra listen.",
    "Valitse sopiva vaihtoehto luettelosta.",
    "Listeden geçerli bir seçenek seçin.",
):
    (scores,) = model.run(None, {"text": encode(line)[None]})
    print(wanted[int(scores.argmax())], line)
