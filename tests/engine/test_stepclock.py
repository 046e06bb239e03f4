"""The clock of steps measures one step of several, by the processor time of its thread."""

import time

from capflow_engine.stepclock import STEPS_EACH, StepClock


def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_one_step_of_several_is_measured_and_waiting_is_not():
    clock = StepClock()
    for number in range(1, 2 * STEPS_EACH + 1):
        begun = clock.begin_step(number)
        if clock.on:
            work(0.01)
        clock.end(begun)
        # Between two parts the thread waits, which costs no processor time.
        time.sleep(0.002)
        begun = clock.begin()
        clock.end(begun)
    assert clock.time.steps == 2
    assert 0.02 <= clock.time.ns / 1e9 < 0.04


def test_a_part_that_began_in_a_step_that_is_not_measured_counts_nothing():
    clock = StepClock()
    begun = clock.begin_step(1)
    clock.begin_step(STEPS_EACH)
    clock.end(begun)
    assert clock.time.ns == 0
