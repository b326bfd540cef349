"""Environments that megadapo brings: tools, and clients of other projects' environments."""

_ADAPTERS = "megadapo.environments.adapters"
BUILT_IN = {
    "calculator": f"{_ADAPTERS}.calculator:Calculator",
    "functions": "megadapo.environments.functions:Functions",
    "mark": f"{_ADAPTERS}.calculator:Mark",
    "openenv": f"{_ADAPTERS}.openenv:OpenEnv",
    "python": f"{_ADAPTERS}.python_tool:PythonTool",
    "search": f"{_ADAPTERS}.search:Search",
    "tools": f"{_ADAPTERS}.toolbox:Toolbox",
    "verifiers": f"{_ADAPTERS}.verifiers:Verifiers",
}
"""MODULE:CLASS of built-in environments by their name in a config."""
CALLED = ("functions", "python", "search", "tools")
"""Those whose tools a model can only call; with others a turn may be an answer by itself."""
