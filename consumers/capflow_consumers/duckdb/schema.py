"""The tables and views of the DuckDB file that the duckdb consumer writes.

| table | one row for each | columns |
|---|---|---|
| requests | finished request | capture, engine, request_id, model, prompt_length, computed_length, status, rows, started_at, finished_at, capture_status, tag |
| tokens | token computed of a request | capture, engine, request_id, position, token_id, text, phase |
| probes | probe, and again when its threshold or file changes | name, kind, pool, site_layer, site_hook, threshold, file, xxh3_64 |
| scores | row scored with a probe of pool `token` | capture, engine, request_id, position, probe, layer, hook, score |
| pools | request in a transaction, and probe of another pool | capture, engine, request_id, probe, layer, hook, rows, total, highest, position, last |
| vectors | row, with the option `vectors` | capture, engine, request_id, position, layer, hook, vector |
| actions | action, asked for through the hub or done inside a worker | capture, engine, request_id, id, answered_at, kind, sites, asked_by, outcome, step, reason |
| marks | run of frames in a transaction, request and worker | capture, engine, request_id, boot, rank, first_frame, last_frame |

`capture` numbers the captured requests of the file: ids come again when an engine is restarted, captures never do. Times are UTC.
phase is `prompt` or `generated`. text is NULL where the engine has no tokenizer. `VIEWS` are the questions that are asked
most, of finished requests; a probe's threshold and pool are the last that the file was opened with.

A row of `pools` is what the rows of one transaction add: how many they were, the sum and the highest of their scores, and the score `last` at the last
`position` of them. The view `request_scores` makes of them, and of `scores`, one row for each request and probe.

`marks` says which frames of which worker (`rank` is pipeline stage, data-parallel replica, tensor-parallel rank, with dots between) a
capture's rows came in: every frame from `first_frame` to `last_frame`, and no other. It is committed with the rows, so that exactly the frames whose rows are
in the file are known when they come again after a kill.
"""

from __future__ import annotations

_KEY = [("capture", "BIGINT"), ("engine", "VARCHAR"), ("request_id", "VARCHAR")]

TABLES: dict[str, list[tuple[str, str]]] = {
    "requests": [
        *_KEY,
        ("model", "VARCHAR"),
        ("prompt_length", "BIGINT"),
        ("computed_length", "BIGINT"),
        ("status", "VARCHAR"),
        ("rows", "BIGINT"),
        ("started_at", "TIMESTAMP"),
        ("finished_at", "TIMESTAMP"),
        ("capture_status", "VARCHAR"),
        ("tag", "VARCHAR"),
    ],
    "tokens": [*_KEY, ("position", "BIGINT"), ("token_id", "INTEGER"), ("text", "VARCHAR"), ("phase", "VARCHAR")],
    "probes": [
        ("name", "VARCHAR"),
        ("kind", "VARCHAR"),
        ("pool", "VARCHAR"),
        ("site_layer", "INTEGER"),
        ("site_hook", "VARCHAR"),
        ("threshold", "DOUBLE"),
        ("file", "VARCHAR"),
        ("xxh3_64", "VARCHAR"),
    ],
    "scores": [
        *_KEY,
        ("position", "BIGINT"),
        ("probe", "VARCHAR"),
        ("layer", "INTEGER"),
        ("hook", "VARCHAR"),
        ("score", "FLOAT"),
    ],
    "pools": [
        *_KEY,
        ("probe", "VARCHAR"),
        ("layer", "INTEGER"),
        ("hook", "VARCHAR"),
        ("rows", "BIGINT"),
        ("total", "DOUBLE"),
        ("highest", "FLOAT"),
        ("position", "BIGINT"),
        ("last", "FLOAT"),
    ],
    "vectors": [*_KEY, ("position", "BIGINT"), ("layer", "INTEGER"), ("hook", "VARCHAR"), ("vector", "FLOAT[]")],
    "actions": [
        *_KEY,
        ("id", "VARCHAR"),
        ("answered_at", "TIMESTAMP"),
        ("kind", "VARCHAR"),
        ("sites", "VARCHAR[]"),
        ("asked_by", "VARCHAR"),
        ("outcome", "VARCHAR"),
        ("step", "BIGINT"),
        ("reason", "VARCHAR"),
    ],
    "marks": [*_KEY, ("boot", "VARCHAR"), ("rank", "VARCHAR"), ("first_frame", "BIGINT"), ("last_frame", "BIGINT")],
}

ADDED: dict[str, tuple[str, ...]] = {"requests": ("tag",)}
"""The columns, last in their tables, that files of earlier versions lack; they are added when such a file is opened, NULL in its rows."""

KEYS: dict[str, str] = {"actions": "id"}
"""The column by which a row is known that is told again, and is in the table once."""

VIEWS: dict[str, str] = {
    "thresholds": """
        SELECT name AS probe, last(pool ORDER BY rowid) AS pool, last(threshold ORDER BY rowid) AS threshold
        FROM probes
        GROUP BY name
    """,
    "fired": """
        SELECT capture, requests.engine, requests.request_id, position, phase, token_id, text, probe, score, threshold
        FROM scores
        JOIN tokens USING (capture, position)
        JOIN requests USING (capture)
        JOIN thresholds USING (probe)
        WHERE score >= threshold
    """,
    "top_tokens": """
        SELECT probe, row_number() OVER ranked AS rank, score, capture, requests.request_id, position, phase, text
        FROM scores JOIN tokens USING (capture, position) JOIN requests USING (capture)
        WINDOW ranked AS (PARTITION BY probe ORDER BY score DESC, capture, position)
        QUALIFY rank <= 100
        ORDER BY probe, rank
    """,
    "request_scores": """
        SELECT capture, engine, request_id, probe, layer, hook, rows, mean, highest, last, pool,
               CASE pool WHEN 'mean' THEN mean WHEN 'max' THEN highest WHEN 'last' THEN last END AS score, threshold
        FROM (
            SELECT capture, probe, layer, hook, sum(rows)::BIGINT AS rows, sum(total) / sum(rows) AS mean,
                   max(highest) AS highest, arg_max(last, position) AS last
            FROM (
                SELECT capture, probe, layer, hook, rows, total, highest, position, last FROM pools
                UNION ALL
                SELECT capture, probe, layer, hook, 1, score, score, position, score FROM scores
            )
            GROUP BY capture, probe, layer, hook
        )
        JOIN (SELECT capture, engine, request_id FROM requests) USING (capture)
        JOIN thresholds USING (probe)
    """,
    "layer_scores": """
        SELECT layer, hook, probe, phase, count(*) AS tokens, avg(score) AS mean, stddev_pop(score) AS deviation,
               max(score) AS highest
        FROM scores JOIN tokens USING (capture, position) JOIN (SELECT capture FROM requests) USING (capture)
        GROUP BY layer, hook, probe, phase
        ORDER BY layer, hook, probe, phase
    """,
}
"""The questions that are asked most, by name, each made with those before it."""
