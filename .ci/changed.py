"""Runs the tests that belong to what has changed: `make changed`, or `python .ci/changed.py [BASE] [pytest's options]`.

What has changed is what differs from BASE (main), committed or not. A test file that changed is run itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The beginning of a file's path, and tests that see a fault in it, beside those of its room: tests/X for deepnmt/X,
# tests/extras/X for a visitor. Every line that fits counts.
TESTS = {
    "deepnmt/checkpoint/": "tests/training/test_resume_anywhere.py tests/project/test_old_run.py",
    "deepnmt/commands/": "tests/cli",
    "deepnmt/config/encoders.py": "tests/tasks",
    "deepnmt/config/": "tests/recipes tests/cli/test_mistakes.py tests/project/test_pages.py",
    "deepnmt/data/examples.py": "tests/tasks",
    "deepnmt/data/task_folder.py": "tests/tasks",
    "deepnmt/data/windows.py": "tests/tasks/language_model",
    "deepnmt/data/": "tests/recipes tests/training/test_training.py",
    "deepnmt/decode/": "tests/evaluate",
    "deepnmt/model/encoder.py": "tests/tasks/classify tests/tasks/masked_lm",
    "deepnmt/model/": "tests/parallel/test_engines.py tests/decode/test_incremental.py",
    "deepnmt/optim/": "tests/parallel/test_optimizers.py",
    "deepnmt/parallel/": "tests/training/test_resume_anywhere.py",
    "deepnmt/processes/": "tests/nodes",
    "deepnmt/tasks/": "tests/training tests/extras/test_erasure.py",
    "deepnmt/training/encoders.py": "tests/tasks",
    "deepnmt/training/transformers.py": "tests/tasks",
    "deepnmt/training/": "tests/checkpoint tests/project/test_old_run.py",
    "deepnmt/extras/": "tests/extras/test_erasure.py",
    "studies/": "tests/studies",
    "recipes/": "tests/recipes",
    "recipes/launch/": "tests/nodes",
    "ds_configs/": "tests/parallel/test_ds_config.py",
    "tools/": "tests/extras/demo",
    "docs/": "tests/project/test_pages.py tests/project/test_guide.py",
    "docs/guide/add_a_block.md": "tests/model/test_new_block.py",
    "docs/guide/first_hour.md": "tests/extras/demo/test_demo.py tests/project/test_wheel.py",
    "docs/guide/new_recipe.md": "tests/cli/test_new.py",
    "docs/guide/notebook.ipynb": "tests/cli/test_notebook.py",
    "docs/guide/tutorial.md": "tests/extras/test_tutorial.py",
    "docs/reference/blocks.md": "tests/model/test_blocks.py",
    "studies/results/initial_weights.md": "tests/model/test_published.py",
    "docs/reference/checkpoints.md": "tests/checkpoint/test_format_page.py",
    "README.md": "tests/project/test_readme.py tests/project/test_pages.py",
    "tests/support/": "tests",
    "tests/conftest.py": "tests",
}
REST = "tests/project/test_project_files.py"  # for a file that nothing else names


def tests_of(path: str) -> set[str]:
    """The tests of a file, as files and folders."""
    found = {test for begin, tests in TESTS.items() if path.startswith(begin) for test in tests.split()}
    parts = Path(path).parts
    if parts[0] == "tests":  # a test, or what the tests beside it use
        found.add(path if parts[-1].startswith("test_") else str(Path(path).parent))
    elif parts[0] == "deepnmt":
        room = Path("tests", *parts[1:3] if parts[1] in ("extras", "tasks") else parts[1:2])
        if (ROOT / room).is_dir():
            found.add(str(room))
        elif len(parts) == 2:  # a file of no room
            found.add("tests/cli")
    return {test for test in found if (ROOT / test).exists()} or {REST}


def changed(base: str) -> set[str]:
    """The files that differ from a commit, and new ones that git does not ignore."""
    commands = (["git", "diff", "--name-only", "--merge-base", base],
                ["git", "ls-files", "--others", "--exclude-standard"])
    said = (subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout for words in commands)
    return {line for text in said for line in text.splitlines()}


def main(words: list[str]) -> int:
    base = words.pop(0) if words and not words[0].startswith("-") else "main"
    named = {test for path in changed(base) for test in tests_of(path)}
    tests = sorted(test for test in named if not any(f"{test}/".startswith(f"{other}/") for other in named - {test}))
    print("changed since", base, "names", *tests or ["nothing"])
    if not tests:
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", *words, *tests], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
