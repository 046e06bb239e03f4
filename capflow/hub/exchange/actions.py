"""The actions: clients and consumers ask for them, schedulers apply them, and the outcome goes back."""

from __future__ import annotations

from collections.abc import Iterable

from capflow.buffers.shares import Shares
from capflow.errors import UsageError
from capflow.hub.effects import AnswerLane, Effects, TellOutcome
from capflow.hub.exchange.action_rates import ActionRates
from capflow.hub.exchange.relay import Ask, Heard, Relay, Settled, asked_of
from capflow.hub.exchange.watchers import Watchers
from capflow.hub.peers.roster import Peer, Roster
from capflow.hub.requests.index import RequestIndex
from capflow.protocol.message import Act, ActionOutcome
from capflow.steering.action import Action, Answered, Freeze, Outcome, check_action


class Actions:
    """The actions that run through the hub.

    state: the memory that actions share.
    hub_id: an id that no other hub has.
    """

    def __init__(
        self, index: RequestIndex, roster: Roster, watchers: Watchers, state: Shares, effects: Effects, hub_id: str
    ) -> None:
        self.relay = Relay(state, hub_id)
        self.rates = ActionRates()
        self._index = index
        self._roster = roster
        self._watchers = watchers
        self._effects = effects

    def ask_for_client(self, peer: bytes, client: Peer, act: Act, nbytes: int) -> None:
        """Take an action of a client.

        nbytes: the size of the action on the wire.
        """
        asked_by = f"client {client.session.user}".rstrip()
        ask = Ask(act.id, act.action, asked_by, client.owner, nbytes, peer=peer, client=client)
        self._ask(ask._replace(sender=act.sender, number=act.number))

    def ask_for_consumer(self, lane: int, consumer: str, action: Action) -> None:
        """Take an action of a consumer.

        lane: the number of its lane.
        """
        self._ask(Ask("", action, consumer, f"consumer {consumer}", lane=lane))

    def outcome(self, scheduler: str, outcome: Outcome) -> None:
        """Take the answer of a scheduler. scheduler: its boot."""
        self._settle(self.relay.outcome(scheduler, outcome))

    def again(self, peer: bytes, scheduler: str) -> None:
        """Send a scheduler that is back the actions that it has not answered."""
        for act in self.relay.again(scheduler, self._effects.now):
            self._effects.say(peer, act)

    def gone(self, scheduler: str) -> None:
        """Note that a scheduler left."""
        self._settle(self.relay.gone(scheduler))

    def expire(self) -> None:
        """Settle actions that no scheduler answered in time."""
        self._settle(self.relay.expire(self._effects.now))

    def _ask(self, ask: Ask) -> None:
        """Pass an action to the engine that runs its request; reject the action if several engines may."""
        if (repeated := self.relay.repeated(ask)) is not None:
            self._settle(repeated)
            return
        if (reason := self._refusal(ask)) is not None:
            self._settle(self.relay.refuse(ask, reason))
            return
        schedulers = {hello.boot: (peer, hello) for peer, hello in self._roster.schedulers()}
        named = self._index.named(ask.action.request, ask.action.engine)
        boots, reason = asked_of(ask.action, named, [hello for _, hello in schedulers.values()])
        if reason is not None:
            self._settle(self.relay.refuse(ask, reason))
            return
        engines = {boot: schedulers[boot][1].engine for boot in boots}
        every = not ask.action.request
        act = self.relay.ask(ask, engines, self._effects.now, has_request=bool(named), every=every)
        if not isinstance(act, Act):
            self._settle(act)
            return
        for boot in boots:
            self._effects.say(schedulers[boot][0], act)

    def _refusal(self, ask: Ask) -> str | None:
        """Return why an action is not passed on; None if it is."""
        try:
            check_action(ask.action)
        except UsageError as e:
            return str(e)
        if isinstance(ask.action, Freeze):
            return None
        return self.rates.refusal(ask.asked_by, ask.action.request, self._effects.now)

    def _settle(self, decided: Iterable[Heard | Settled]) -> None:
        """Tell every lane the outcome of actions, and answer those who asked."""
        decided = [*decided, *self.relay.repeats]
        self.relay.repeats.clear()
        for each in decided:
            if isinstance(each, Heard):
                action, asked_by = each.ask.action, each.ask.asked_by
                self._effects.add(TellOutcome(action, each.outcome, each.engine, asked_by))
                if self._watchers.minds_actions:
                    self._watchers.tell(Answered.of(action, each.outcome, engine=each.engine, asked_by=asked_by))
                continue
            ask, outcome = each
            if ask.lane is not None:
                self._effects.add(AnswerLane(ask.lane, outcome))
                continue
            # The connection may belong to another client by now.
            if self._roster.peers.get(ask.peer) is ask.client:
                self._effects.say(ask.peer, ActionOutcome(outcome))
