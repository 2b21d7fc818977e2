.PHONY: setup fmt lint types test
setup:
	uv sync
fmt:
	uv run ruff check --fix .
	uv run ruff format .
lint:
	uv run ruff check .
	uv run ruff format --check .
types:
	uv run pyright
test:
	uv run pytest
