"""The tables and views of the DuckDB file that the duckdb consumer writes.

Each table has one row for each:

* requests: finished request.
* tokens: token that a request computed.
* probes: probe, and one more whenever its threshold or file changes.
* scores: captured row and probe of pool `token`.
* pools: request and probe of another pool, in each transaction.
* saes: autoencoder whose features are recorded; `k` is its number of active features, 0 unless it is a TopK one.
* features: captured row and feature that is among the most active ones there.
* lenses: lens that rows are read with.
* lens_tokens: captured row and token that is among the most likely ones there; `rank` is 1 for the most likely one.
* vectors: captured row, with the option `vectors`.
* actions: event of steering: an action that was asked for through the hub, or what happened inside a worker.
* marks: run of consecutive frames of one worker, in each transaction and request.

`capture` numbers the captured requests of the file. A request id may return when an engine is restarted; a capture's
number never does. Times are UTC. `phase` is `prompt` or `generated`. `text` is NULL if the engine has no tokenizer.
`adapter` is the name of the request's LoRA adapter; NULL for none. `weights` has the versions of the weights that
computed the request's rows, in order, and `weights_label` the name of the last, NULL if it has none.
`steered` says whether an operation acted at the token's position; NULL if the engine did not say it.
`VIEWS` answer the most common questions about finished requests; a probe's threshold and pool are the latest that the
file was opened with.

A row of `pools` is what one transaction adds to a request's pooled score: `rows` captured rows, `total` and `highest`
of their scores, and the score `last` at their last `position`. The view `request_scores` combines these rows and those
of `scores` into one row for each request and probe.

`marks` names the frames from which a capture's rows came: every frame of the worker `boot`, `rank` from `first_frame`
to `last_frame`, and no other. `rank` is the pipeline stage, the data-parallel replica and the tensor-parallel rank,
joined by dots. `marks` is committed with the rows, so a frame that is delivered again after a kill is recognised.
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
        ("adapter", "VARCHAR"),
        ("weights", "BIGINT[]"),
        ("weights_label", "VARCHAR"),
    ],
    "tokens": [
        *_KEY,
        ("position", "BIGINT"),
        ("token_id", "INTEGER"),
        ("text", "VARCHAR"),
        ("phase", "VARCHAR"),
        ("steered", "BOOLEAN"),
    ],
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
    "saes": [
        ("name", "VARCHAR"),
        ("site_layer", "INTEGER"),
        ("site_hook", "VARCHAR"),
        ("features", "INTEGER"),
        ("k", "INTEGER"),
        ("file", "VARCHAR"),
        ("xxh3_64", "VARCHAR"),
    ],
    "features": [
        *_KEY,
        ("position", "BIGINT"),
        ("sae", "VARCHAR"),
        ("layer", "INTEGER"),
        ("hook", "VARCHAR"),
        ("feature", "INTEGER"),
        ("activation", "FLOAT"),
    ],
    "lenses": [
        ("name", "VARCHAR"),
        ("kind", "VARCHAR"),
        ("model", "VARCHAR"),
        ("file", "VARCHAR"),
        ("xxh3_64", "VARCHAR"),
    ],
    "lens_tokens": [
        *_KEY,
        ("position", "BIGINT"),
        ("lens", "VARCHAR"),
        ("layer", "INTEGER"),
        ("hook", "VARCHAR"),
        ("rank", "INTEGER"),
        ("token_id", "INTEGER"),
        ("text", "VARCHAR"),
        ("logit", "FLOAT"),
        ("probability", "DOUBLE"),
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
        ("position", "BIGINT"),
        ("score", "DOUBLE"),
        ("threshold", "DOUBLE"),
        ("label", "VARCHAR"),
        ("incarnation", "VARCHAR"),
        ("target", "VARCHAR"),
        ("scale", "DOUBLE"),
    ],
    "marks": [*_KEY, ("boot", "VARCHAR"), ("rank", "VARCHAR"), ("first_frame", "BIGINT"), ("last_frame", "BIGINT")],
}

ADDED: dict[str, tuple[str, ...]] = {
    "requests": ("tag", "adapter", "weights", "weights_label"),
    "tokens": ("steered",),
    "actions": ("position", "score", "threshold", "label", "incarnation", "target", "scale"),
}
"""Columns that files of earlier versions lack, the last of their tables.

They are added when such a file is opened, with NULL in its rows.
"""

KEYS: dict[str, str] = {"actions": "id"}
"""Tables with a unique column: a row whose key the table already has is not added."""

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
    "events": """
        SELECT answered_at AS happened_at, capture, engine, request_id, position, kind, asked_by, target, scale, label,
               score, threshold, sites, step, outcome, reason
        FROM actions
        ORDER BY answered_at, position
    """,
    "top_tokens": """
        SELECT probe, row_number() OVER ranked AS rank, score, capture, requests.request_id, position, phase, text
        FROM scores JOIN tokens USING (capture, position) JOIN requests USING (capture)
        WINDOW ranked AS (PARTITION BY probe ORDER BY score DESC, capture, position)
        QUALIFY rank <= 100
        ORDER BY probe, rank
    """,
    "active_features": """
        SELECT sae, feature, count(*) AS tokens, count(DISTINCT capture) AS requests, avg(activation) AS mean,
               max(activation) AS highest
        FROM features JOIN (SELECT capture FROM requests) USING (capture)
        GROUP BY sae, feature
        ORDER BY sae, tokens DESC, feature
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
"""The views by name; each may use those before it."""
