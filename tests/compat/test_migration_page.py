"""docs/migration.md is up to date and complete."""

from pathlib import Path

import bestiary
from bestiary.compat.migration_page import SECTIONS, render_page
from bestiary.compat.programs import PROGRAMS

PAGE = Path(bestiary.__file__).parents[1] / "docs" / "migration.md"


def test_the_committed_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(), f"run: python -m bestiary.compat.migration_page > {PAGE}"


def test_the_page_has_all_flags_of_all_programs() -> None:
    page = render_page()
    assert {name for section in SECTIONS for name in section.programs} == set(PROGRAMS)
    missing = [flag.name for program in PROGRAMS.values() for flag in program.flags if f"| `{flag.name}` |" not in page]
    assert not missing


def test_lines_outside_tables_have_at_most_120_characters() -> None:
    assert [line for line in render_page().splitlines() if len(line) > 120 and not line.startswith("|")] == []
