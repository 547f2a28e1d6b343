"""Asks a server by OpenAI's client and instructor: chats.py URL MODEL. Prints one line each."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city and the country that it is in."""

    city: str
    country: str


url, model = sys.argv[1:]
asked = [{"role": "user", "content": "Paris is the capital of France. Which city, which country?"}]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
response = client.responses.create(model=model, input=asked, max_output_tokens=12)
print("responses.create:", response.output_text)
print(
    "responses.parse:",
    client.responses.parse(model=model, input=asked, text_format=City).output_parsed,
)
chat = client.chat.completions
print(
    "completions.parse:",
    chat.parse(model=model, messages=asked, response_format=City).choices[0].message.parsed,
)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    made = instructor.from_openai(client, mode=mode)
    told = made.chat.completions.create(
        model=model, messages=asked, response_model=City, max_retries=0
    )
    print(f"instructor, {mode.name}:", told)
