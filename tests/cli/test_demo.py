"""`lydite demo` from end to end."""

from click.testing import CliRunner

from lydite.cli import demo
from lydite.cli.main import lydite


def test_the_demo_runs_twice_in_the_same_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "PROMPTS", ("a large red star above a small blue ring",))
    for _ in range(2):
        result = CliRunner().invoke(lydite, ["demo", "-o", str(tmp_path / "demo")])
        assert result.exit_code == 0, result.exception
        assert "large red star" in result.output and "small blue ring" in result.output
        assert "identical" in result.output and "NOT CLEAN" not in result.output
    names = sorted(path.name for path in (tmp_path / "demo").glob("*.png"))
    assert names == ["demo_0.png", "demo_0_again.png"]
