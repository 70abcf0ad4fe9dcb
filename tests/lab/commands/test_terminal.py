"""Tables fit a terminal, and are whole elsewhere."""

import pytest

from neumann.lab.commands.terminal import make_table, print_names, print_sentences, print_table

LONG = "adamw:weight_decay=0.01,betas=(0.9, 0.95),lr=0.0215"


@pytest.fixture
def table():
    table = make_table("\narm", "\nseeds", "accuracy\n%", "\ntop-5, %", "\nseconds")
    table.add_row("neumann", "3", "98.83 ± 0.29", "99.90", "1.2")
    table.add_row("sgd", "3", "95.89 ± 0.45", "99.10", "1.1")
    return table


def test_a_wide_terminal_shows_all(table, terminal, capsys):
    terminal(80)
    print_table(table, spare=[3, 1])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["arm", "seeds", "%", "top-5,", "%", "seconds"]


def test_a_narrow_terminal_leaves_out_the_least_important(table, terminal, capsys):
    terminal(43)
    print_table(table, ["a verdict"], spare=[3, 1])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 43
    assert lines[1].split() == ["arm", "seeds", "%", "seconds"]
    assert lines[3].split() == ["sgd", "3", "95.89", "±", "0.45", "1.1"]
    assert lines[4:] == ["no room for top-5: see the report", "a verdict"]
    terminal(35)
    print_table(table, spare=[3, 1])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 35
    assert lines[4] == "no room for seeds and top-5: see"
    assert lines[5] == "the report"


def test_without_spare_columns_words_break(table, terminal, capsys):
    terminal(45)
    table.columns[0]._cells[0] = "neumann-spectral"
    print_table(table)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 45
    assert "98.83 ± 0.29" in printed
    assert "…" not in printed


def test_a_file_gets_the_whole_table(table, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    print_table(table, [LONG], spare=[3, 1])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["arm", "seeds", "%", "top-5,", "%", "seconds"]
    assert lines[-1] == LONG


def test_sentences_break_between_words_and_names_do_not_break(terminal, capsys):
    terminal(30)
    print_sentences(["no clear difference between neumann and sgd"])
    assert capsys.readouterr().out == "no clear difference between\nneumann and sgd\n"
    print_names([LONG])
    assert capsys.readouterr().out == f"{LONG}\n"


def test_text_is_shown_as_it_is(capsys):
    print_sentences(["lr=0.1:100:3 [bold]"])
    assert capsys.readouterr().out == "lr=0.1:100:3 [bold]\n"
