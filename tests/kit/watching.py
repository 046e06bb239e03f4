"""The work of a scheduler, counted by watching it."""

from collections import Counter


def watch(llm):
    """Return counts that grow while an engine of this process runs.

    `steps`; `ahead`, the most steps under way when another was scheduled; `overshot`, parts of steps computed for a
    request that had ended; `preempted`, and `preempted late`, behind half of the answer; `resumed from cache`, how
    often a preempted request came back with computed tokens; `drafts` accepted and rejected; `chunks`, the most steps
    of one prompt.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    counts = Counter()
    schedule, update, preempt = scheduler.schedule, scheduler.update_from_output, scheduler._preempt_request
    under_way, chunks, waiting = [], Counter(), set()

    def watched_schedule(*args, **kwargs):
        output = schedule(*args, **kwargs)
        counts["steps"] += 1
        counts["ahead"] = max(counts["ahead"], len(under_way))
        under_way.append(output)
        # The V2 runner is given resumed requests as new ones.
        more = output.scheduled_cached_reqs
        resumed = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
        for key, computed in (*resumed, *zip(more.req_ids, more.num_computed_tokens, strict=True)):
            counts["resumed from cache"] += key in waiting and computed > 0
            waiting.discard(key)
        for key in output.num_scheduled_tokens:
            if scheduler.requests[key].num_output_tokens == 0:
                chunks[key] += 1
                counts["chunks"] = max(counts["chunks"], chunks[key])
        return output

    def watched_update(scheduled, sampled):
        under_way.pop(next(n for n, output in enumerate(under_way) if output is scheduled))
        counts["overshot"] += sum(key not in scheduler.requests for key in scheduled.num_scheduled_tokens)
        for key, drafts in scheduled.scheduled_spec_decode_tokens.items():
            accepted = max(len(sampled.sampled_token_ids[sampled.req_id_to_index[key]]) - 1, 0)
            counts["accepted"] += accepted
            counts["rejected"] += len(drafts) - accepted
        return update(scheduled, sampled)

    def watched_preempt(request, *args, **kwargs):
        counts["preempted"] += 1
        counts["preempted late"] += 2 * request.num_output_tokens > request.max_tokens
        waiting.add(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
    scheduler._preempt_request = watched_preempt
    return counts
