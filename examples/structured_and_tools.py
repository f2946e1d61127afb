"""Asks a model for JSON that follows a schema, then lets it call a tool and answer from what the tool said.

`bitmill models load URI --option tool_call_parser=hermes`, then `python examples/structured_and_tools.py`. The parser
is that of the model's family.
"""

import argparse
import json

from bitmill import BitmillRpcError, InferenceClient, structured
from bitmill.inference.v1.generation_pb2 import ChatMessage

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "inhabitants": {"type": "integer", "maximum": 99999999},
    },
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "description": "The weather in a city now.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Ulm"]}}, "required": ["city"]},
    # Without it the parser decides whether the arguments must follow the schema.
    "strict": True,
}


def weather(city: str) -> str:
    return {"Paris": "rain, 12 °C", "Ulm": "sun, 21 °C"}[city]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50052")
    parser.add_argument("--model", default="", help="may be left out when exactly one is loaded")
    arguments = parser.parse_args()
    with InferenceClient(arguments.address) as inference:
        try:
            ask_for_json(inference, arguments.model)
            ask_with_a_tool(inference, arguments.model)
        except BitmillRpcError as error:
            raise SystemExit(str(error)) from error


def ask_for_json(inference: InferenceClient, model: str) -> None:
    """The engine masks every token that would leave the schema, so the text always parses."""
    response = inference.chat_unary(
        "Name a European capital and how many people live there.",
        model=model,
        structured_outputs=structured.json_schema(CITY, disable_any_whitespace=True),
        max_tokens=128,
        temperature=0,
    )
    print("JSON:", json.loads(response.choices[0].message.content))


def ask_with_a_tool(inference: InferenceClient, model: str) -> None:
    """The message that asks for the tool goes back as it is, followed by one message for each call that it made."""
    conversation = [ChatMessage(role="user", content="What is the weather in Paris?")]
    asking = inference.chat_unary(
        conversation, model=model, tools=[WEATHER], tool_choice="weather", max_tokens=128, temperature=0
    )
    conversation.append(asking.choices[0].message)
    for call in asking.choices[0].message.tool_calls:
        print("call:", call.name, call.arguments_json)
        answer = weather(**json.loads(call.arguments_json))
        conversation.append(ChatMessage(role="tool", tool_call_id=call.id, content=answer))
    for chunk in inference.chat(
        conversation, model=model, tools=[WEATHER], tool_choice="none", max_tokens=48, temperature=0
    ):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
