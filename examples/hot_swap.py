"""Replaces a model while callers use it, without a failed call: `python examples/hot_swap.py OLD_URI NEW_URI`.

Callers name the alias. The new model loads under a name of its own; once it serves, the alias moves to it, and the old
one is unloaded when its running calls have ended. Both must fit the host's memory for that time.
"""

import argparse
import asyncio
from collections import Counter

from bitmill import AsyncInferenceClient, BitmillRpcError
from bitmill.inference.v1.model_pb2 import ModelState

CALLERS = 4


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old_uri")
    parser.add_argument("new_uri")
    parser.add_argument("--alias", default="assistant")
    parser.add_argument("--address", default="127.0.0.1:50052")
    arguments = parser.parse_args()
    alias = arguments.alias
    async with AsyncInferenceClient(arguments.address) as inference:
        await inference.load_model(arguments.old_uri, name=f"{alias}-1", aliases=alias, enforce_eager=True)
        outcomes: Counter[str] = Counter()
        swapped = asyncio.Event()
        callers = [asyncio.create_task(call(inference, alias, outcomes, swapped)) for _ in range(CALLERS)]
        old = asyncio.create_task(states(inference, f"{alias}-1"))
        model = await inference.load_model(
            arguments.new_uri, name=f"{alias}-2", aliases=alias, unload_replaced=True, enforce_eager=True
        )
        print(f"{alias} is {model.name} now")
        swapped.set()
        await asyncio.gather(*callers)
        print(f"{alias}-1 was", ", ".join(await old))
        print(dict(outcomes))


async def call(inference: AsyncInferenceClient, model: str, outcomes: Counter[str], swapped: asyncio.Event) -> None:
    """Generates again and again until the models are swapped, and once more."""
    last = False
    while not last:
        last = swapped.is_set()
        try:
            async for _ in inference.generate("The mill", model=model, max_tokens=32, ignore_eos=True):
                pass
            outcomes["answered"] += 1
        except BitmillRpcError as error:
            outcomes[str(error)] += 1


async def states(inference: AsyncInferenceClient, name: str) -> list[str]:
    """Follows a model until it is unloaded and returns its states."""
    return [ModelState.Name(change.state) async for change in inference.watch_model(name)]


if __name__ == "__main__":
    asyncio.run(main())
