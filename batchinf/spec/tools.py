"""The form of tools: OpenAI's, as vLLM's server reads it. The spec and the lines of batch files have such tools."""

from typing import Any

from batchinf.base.text import clip, name_type

# Fields of a function that vLLM's server gives to the chat template. The first three are there in any case.
_TYPES: dict[str, tuple[type, str]] = {
    "name": (str, "text"),
    "description": (str, "text"),
    "parameters": (dict, "a JSON schema, as a mapping"),
    "strict": (bool, "true or false"),
}


def objection_to(tool: object) -> str | None:
    """Why a value is no tool that vLLM's server takes; None if it is one."""
    form = "must be {type: function, function: {name, description, parameters}}"
    if not isinstance(tool, dict):
        return f"got {name_type(tool)} for a tool; {form}"
    if tool.get("type", "function") != "function":
        return f"got a tool of type {clip(str(tool['type']))}; {form}"
    function = tool.get("function")
    if not isinstance(function, dict):
        return f"got a tool without function; {form}"
    if not function.get("name"):
        return f"got a function without a name; {form}"
    for name, (kind, words) in _TYPES.items():
        value = function.get(name)
        if value is not None and not isinstance(value, kind):
            return f"got {name_type(value)} for {name} of the function {clip(str(function['name']))}; must be {words}"
    return None


def as_served(tool: dict[str, Any]) -> dict[str, Any]:
    """A valid tool as vLLM's server gives it to the chat template: with null for what is missing, without the rest."""
    given = tool["function"]
    function = {name: given.get(name) for name in _TYPES}
    if function["strict"] is None:
        del function["strict"]
    return {"type": "function", "function": function}
