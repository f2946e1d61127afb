"""Streams the continuation of a prompt: `python examples/generate.py "Once upon a time"`."""

import argparse

from bitmill import BitmillRpcError, InferenceClient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50052")
    parser.add_argument("--model", default="", help="may be left out when exactly one is loaded")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    with InferenceClient(arguments.address) as inference:
        try:
            chunks = inference.generate(arguments.prompt, model=arguments.model, max_tokens=arguments.max_tokens)
            for chunk in chunks:
                print(chunk.text, end="", flush=True)
            print()
        except BitmillRpcError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
