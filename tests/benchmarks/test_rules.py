"""What the benchmarks may import, and how their modules are named."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "benchmarks").glob("**/*.py"))
# Private names without a public equivalent: torch's waiting kernel, the switch of an older version.
DISPATCH_MODE = ("torch.utils._python_dispatch", "TorchDispatchMode")  # torch has no other path
ALLOWED = {"_sleep", "_fused"}


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module, alias.name) for alias in node.names)


def is_script(path):
    return '__name__ == "__main__"' in path.read_text()


def test_benchmarks_import_no_tests():
    for path in MODULES:
        for module, _ in imports(ast.parse(path.read_text())):
            assert module.split(".")[0] != "tests", path
            assert not module.startswith("unittest"), path


def test_benchmarks_use_no_private_names():
    for path in MODULES:
        tree = ast.parse(path.read_text())
        for module, name in imports(tree):
            private = any(part.startswith("_") for part in [*module.split("."), name])
            assert not private or (module, name) == DISPATCH_MODE, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                special = node.attr.startswith("__") or node.attr in ALLOWED
                assert own or special, f"{path}:{node.lineno} uses {node.attr}"


def test_no_module_imports_a_script():
    scripts = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in MODULES
        if is_script(path)
    }
    assert len(scripts) > 10
    for path in MODULES:
        for module, name in imports(ast.parse(path.read_text())):
            assert scripts.isdisjoint((module, f"{module}.{name}")), path


def test_file_names_are_unique():
    """Among the benchmarks and beside the library, so that a name says which file is meant."""
    own = Counter(path.name for path in MODULES if path.name != "__init__.py")
    library = {path.name for path in (ROOT / "src").glob("**/*.py")}
    assert [name for name, count in own.items() if count > 1 or name in library] == []
