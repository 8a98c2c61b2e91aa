"""Tutorial 3: fine-tune a small text encoder."""

# %% [markdown]
# # 3. Fine-tune text
#
# A small transformer reads text letter by letter. On the workstation it learns to tell six languages
# apart. On the device it is fine-tuned for what one user needs: Danish, Finnish or Turkish? The text
# is real: the messages of Django in their translations, as its wheel ships them.
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
    """The translations of a language, by what is translated."""
    found = {}
    for name in archive.namelist():
        if name.endswith(f"/locale/{language}/LC_MESSAGES/django.mo"):
            catalog = gettext.GNUTranslations(io.BytesIO(archive.read(name)))._catalog
            found.update((k, v) for k, v in catalog.items() if isinstance(k, str) and k)
    return found


def numbers(text: str) -> np.ndarray:
    """Letters as numbers: 0 is nothing, 1 is a letter from elsewhere."""
    codes = [ord(letter) if ord(letter) < LETTERS else 1 for letter in text.lower()]
    return np.array((codes + [0] * LENGTH)[:LENGTH], np.int64)


def pieces(languages: list[str], test: bool) -> tuple[np.ndarray, np.ndarray]:
    """Lines of up to 40 letters; a message is for training or for the test in all languages."""
    texts, labels = [], []
    for label, language in enumerate(languages):
        for original, translated in messages(language).items():
            if (zlib.crc32(original.encode()) % 4 == 0) == test:
                lines = [s for s in textwrap.wrap(translated, LENGTH) if len(s) >= 12]
                texts += [numbers(line) for line in lines]
                labels += [label] * len(lines)
    return np.stack(texts), np.array(labels)


known = ["de", "fr", "es", "it", "nl", "pl"]
train, test = pieces(known, test=False), pieces(known, test=True)
print(train[0].shape, test[0].shape)

# %% [markdown]
# ## The encoder
#
# An embedding, one layer of attention with the usual residuals, and the mean over the letters.

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
# ## Pretraining, on the workstation
#
# onnxtrain trains it from nothing, too.

# %%
import onnxtrain
from onnxtrain import artifacts, onnxblock


def prepare(model, folder: str, frozen: list[str] | None = None) -> artifacts.Artifacts:
    return artifacts.generate_artifacts(
        model,
        frozen_params=frozen,
        loss=onnxblock.loss.CrossEntropyLoss(),
        optimizer=onnxblock.optim.AdamW(weight_decay=0.01),
        artifact_directory=folder,
        additional_output_names=["scores"],
    )


def learn(session: onnxtrain.TrainingSession, data, unseen, epochs: int, rate: float):
    session.set_learning_rate(rate)
    schedule = {"name": "cosine", "warmup_ratio": 0.1}
    return onnxtrain.fit(
        session, data, epochs, validation=unseen, metrics=["accuracy"], schedule=schedule, seed=0
    )


print(prepare("encoder.onnx", "pretraining"))
session = onnxtrain.TrainingSession.from_folder("pretraining")
learn(session, train, test, epochs=4, rate=3e-3)
session.export_model_for_inferencing("pretrained.onnx", ["scores"])

# %% [markdown]
# ## Fine-tuning, on the device
#
# The user has 150 lines of each of three languages that the encoder has never seen. A new head learns
# them, and most of the encoder with it: the embedding has not met a Danish æ before. The convolution
# stays as it is.

# %%
from onnxtrain.offline.passes.replace_classifier import replace_classifier

wanted = ["da", "fi", "tr"]
lines, labels = pieces(wanted, test=False)
chosen = np.concatenate([np.flatnonzero(labels == k)[:150] for k in range(3)])
few, unseen = (lines[chosen], labels[chosen]), pieces(wanted, test=True)

replaced = replace_classifier("pretrained.onnx", len(wanted))
made = prepare(replaced.model, "artifacts", frozen=["before.*", "places"])
print(made.parameter_count, "numbers train,", sum(made.frozen.values()), "stay")
session = onnxtrain.TrainingSession.from_folder("artifacts")
history = learn(session, few, unseen, epochs=8, rate=3e-3)
figure = history.plot("loss.png")

# %% [markdown]
# What the exported model says:

# %%
import onnxruntime

session.export_model_for_inferencing("personal.onnx", ["scores"])
model = onnxruntime.InferenceSession("personal.onnx")
for line in (
    "Vælg en gyldig mulighed fra listen.",
    "Valitse sopiva vaihtoehto luettelosta.",
    "Listeden geçerli bir seçenek seçin.",
):
    (scores,) = model.run(None, {"text": numbers(line)[None]})
    print(wanted[int(scores.argmax())], line)
