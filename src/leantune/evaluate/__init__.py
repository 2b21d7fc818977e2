"""Metrics of answers, and answers side by side. Imports no torch."""

from leantune.evaluate.choice import extract_choice, options_of
from leantune.evaluate.compare import Comparison, compare
from leantune.evaluate.exact import exact_match
from leantune.evaluate.gsm8k import extract_number, numbers_match
from leantune.evaluate.loss import perplexity
from leantune.evaluate.prompts import read_prompts
from leantune.evaluate.score import METRICS, Metric, Score, default_metric, known_metric, score
from leantune.evaluate.sql import SqlExecution, execution_match, extract_sql

__all__ = [
    "METRICS",
    "Comparison",
    "Metric",
    "Score",
    "SqlExecution",
    "compare",
    "default_metric",
    "exact_match",
    "execution_match",
    "extract_choice",
    "extract_number",
    "extract_sql",
    "known_metric",
    "numbers_match",
    "options_of",
    "perplexity",
    "read_prompts",
    "score",
]
