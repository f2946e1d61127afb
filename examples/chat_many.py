"""Answers several questions at once over one connection: `python examples/chat_many.py "2+2?" "3+3?"`."""

import argparse
import asyncio

from bitmill import AsyncInferenceClient


async def answer(inference: AsyncInferenceClient, question: str, max_tokens: int) -> str:
    pieces = [chunk.content async for chunk in inference.chat(question, max_tokens=max_tokens)]
    return "".join(pieces)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="+", metavar="QUESTION")
    parser.add_argument("--address", default="127.0.0.1:50052")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    async with AsyncInferenceClient(arguments.address) as inference, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(answer(inference, question, arguments.max_tokens)) for question in arguments.questions
        ]
    for question, task in zip(arguments.questions, tasks, strict=True):
        print(f"{question}\n{task.result()}\n")


if __name__ == "__main__":
    asyncio.run(main())
