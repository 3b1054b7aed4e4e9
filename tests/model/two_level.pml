/* Model of the two ops where rows cross between nodes once: forwarders stage rows, add up sums and pass signals on.
 *
 * As in protocol.pml ranks run free, each through the same chain of OPS ops, RUN dispatches, RUN combines, RUN
 * dispatches, ... or in ANY_ORDER, and a cell of a window holds the number of the op that it was written for; what that
 * leaves out is said there. NODES=22 is two nodes of two ranks; 111, 12 and 13 are alike. Every op has two halves. In
 * the first a rank writes what is its own, tells those whom it tells itself, and waits for its neighbours and, of a
 * dispatch, for those it serves. In the second it forwards, passes on what it has heard, and waits for all. Over a
 * network nothing but flushes orders anything: that a header is there before its signal, and a signal before the next one
 * of its rank, is taken for granted here.
 *
 * Must hold: no flag, ONE_WAY (only node 0 sends tokens to other nodes), and
 *   REFUSE  A rank may refuse its input. It announces that in place of data, and passes on what it hears.
 *   RAISE   A rank may raise at any moment and leave for good; it poisons everybody's memory, which every wait polls.
 *   DIE     A rank's process may end at any moment, also while it poisons; a wait sees whether whoever is to tell it has.
 *   CLOSE   Ranks that have run all ops close, and say so to all at once.
 *   SWAP    Rank 1 issues its first dispatch and its first combine in the other order.
 * Must be refuted:
 *   SINGLE=window                 One window instead of two, whatever follows what.
 *   LATE=window                   The signal comes before what is in that window.
 *   NOT_FOR_NEIGHBOURS=D|C        A forwarder does not wait for its neighbours before it forwards.
 *   FOR_ALL_DIRECT                It waits for all whom it hears directly, those that pass on to it what it waits for too.
 *   ONE_WAY SKIP_SILENT           Nobody waits for a rank of another node that sends nothing to this one.
 *   REFUSE HIDE=D|C               A refusal is not passed on.
 *   REFUSE IDLE                   A rank that refuses its input passes nothing on.
 *   RAISE NO_POISON               A rank leaves without telling all.
 *   DIE NO_RELAY                  A rank that is poisoned leaves, and leaves it to the first one to tell the others.
 *   DIE NO_WATCH                  Nobody looks whether a process has ended.
 *   DIE|CLOSE WATCH_SOURCE        A wait looks at the rank whose signal it waits for, not at the one that passes it on.
 *   SWAP NO_CHECK                 Nobody looks whether a rank has gone on to the other kind.
 *   ORDER_OF_ALL                  Whoever looks believes that of ranks, too, whose ops of one kind another passes on.
 */
#ifndef NODES
#define NODES 22
#endif
#ifndef RUN
#define RUN 1
#endif
#ifndef OPS
#define OPS 6
#endif

#include "nodes.pml"

#if defined(RAISE) || defined(DIE) || defined(SWAP)
#define FAILS
#endif
#ifdef RAISE
#define FAIL raise
#elif defined(DIE)
#define FAIL die
#endif
#if defined(DIE) && !defined(NO_RELAY)
#define RELAY raise
#else
#define RELAY left /* whoever raises tells all, unless it dies meanwhile */
#endif
#ifdef HIDE
#define PASSED(header) (k == HIDE -> HDR(0) : header)
#else
#define PASSED(header) header
#endif
#ifdef IDLE
#define PASSES_ON !refuse
#else
#define PASSES_ON true
#endif
#ifdef NOT_FOR_NEIGHBOURS
#define WITH(p) (NEAR(p) && k != NOT_FOR_NEIGHBOURS)
#elif defined(FOR_ALL_DIRECT)
#define WITH(p) (NEAR(p) || announcer[MAILBOX(me, p)] == (p))
#else
#define WITH(p) NEAR(p)
#endif

/* Whom this half of the op tells, in any order, and whom it waits for. */
inline begin_half() {
    to = (first -> tells[k * N + me] : (PASSES_ON -> passes[k * N + me] : 0));
    awaited = 0;
    for (q : 0 .. N - 1) {
        awaited = awaited | (q != me && TALKS(q) && (!first || WITH(q) || (k == D && SERVED(q))) -> BIT(q) : 0)
    };
    q = 0
}

/* Begins to write what is this rank's own, or as a forwarder. Each rank adds up its own partials where they are. */
inline write() {
    for (s : 0 .. N - 1) {
        if
        :: k == D && first && s == me -> ROW(me) = BEGUN
        :: k == D && !first && SERVED(s) -> STAGED(s) = BEGUN
        :: k == C && first && s != me && NEAR(s) -> PARTIAL(s, me) = BEGUN
        :: k == C && first && !NEAR(s) && !SERVED(s) -> FORWARD(s, me) = BEGUN
        :: k == C && !first && SERVED(s) -> SUM(s, NODE(me)) = BEGUN
        :: else
        fi
    };
    s = 0
}

/* Ends what it has begun, but in the window `late`. */
#define FINISH(place, w) place = (place == BEGUN && late != w -> DONE : place)
inline finish(late) {
    for (s : 0 .. N - 1) {
        if
        :: k == D && s == me -> FINISH(ROW(me), ROWS)
        :: k == D && SERVED(s) -> FINISH(STAGED(s), STAGING)
        :: k == C && s != me && NEAR(s) -> FINISH(PARTIAL(s, me), PARTIALS)
        :: k == C && !NEAR(s) && !SERVED(s) -> FINISH(FORWARD(s, me), FORWARDED)
        :: k == C && SERVED(s) -> FINISH(SUM(s, NODE(me)), SUMS)
        :: else
        fi
    };
    s = 0
}

/* Tells rank p of its own op, or what it has heard: of a dispatch from those it serves, of a combine from its node. */
inline tell(p) {
    if :: !first && !saw -> look_as_forwarder() :: else fi;
    finish(LATE);
    for (s : 0 .. N - 1) {
        if
        :: (first && s == me) || (!first && p != me && (k == D -> SERVED(s) : NEAR(s))) ->
            cell = HEADER(me, s);
            HEADER(p, s) = (s == me -> cell : PASSED(cell));
            SIG(p, s) = u
        :: else
        fi
    };
    s = 0;
    to = to - BIT(p)
}

proctype rank(byte me) {
    byte i, u, to, awaited, lost, count[2];
    bit k, first, refuse, saw, reads, window[2];
    byte before = NO_KIND;

    do
    :: atomic {
        d_step { /* The op before ends: what it has read until now is still what it was. */
            if
            :: reads ->
                look_at_headers(awaited);
                if :: !saw -> look() :: else fi;
                completed_past_failure = i > failed_at;
                assert(!completed_past_failure);
                lost = lost | (k == D && saw -> BIT(i % RUN) : 0);
                i++;
                reads = 0
            :: else
            fi
        }
        if
        :: i == OPS -> goto ended
        :: i < OPS && KIND(i) == C && (lost & BIT(i % RUN)) ->
            /* Its dispatch was refused, so there is no handle to combine with. Ranks that disagree on that would hang. */
            lost = lost - BIT(i % RUN);
            i++
        :: else ->
            d_step {
                k = KIND(i);
                count[k]++;
                u = count[k];
                window[k] = TURN;
                before = k;
                first = 1;
                refuse = 0;
                reads = 1
            }
#ifdef REFUSE
            if :: refuse = 1 :: true fi;
            TRUTH = (TRUTH > HDR(refuse) -> TRUTH : HDR(refuse));
#endif
            d_step {
                HEADER(me, me) = HDR(refuse);
                if :: !refuse -> write() :: else fi;
                begin_half()
            }
        fi
    }
    if
    :: !reads
    :: reads ->
        do
        :: d_step { (to & BIT(0)) -> tell(0) }
        :: d_step { (to & BIT(1)) -> tell(1) }
        :: d_step { (to & BIT(2)) -> tell(2) }
#if N > 3
        :: d_step { (to & BIT(3)) -> tell(3) }
#endif
        :: d_step { /* It forwards. */
            first && !to && !ANY(UNHEARD) ->
            finish(NO_WINDOW);
            look_at_headers(awaited);
            if :: !saw -> look_as_forwarder() :: else fi;
            first = 0;
            if :: !saw -> write() :: else fi;
            begin_half()
        }
        :: d_step { /* It gathers or reduces. One interval covers all peers. */
            !first && !to && !ANY(UNHEARD) ->
            finish(NO_WINDOW);
            look_at_headers(awaited);
#ifdef REFUSE
            refusal_missed = TRUTH == HDR(!saw);
            assert(!refusal_missed);
#endif
            if :: !saw -> look() :: else fi
        } -> break
#ifdef FAIL
        :: to -> goto FAIL
#endif
#if defined(FAILS) && !defined(NO_POISON)
        :: !to && (poison & BIT(me)) -> goto RELAY
#endif
#if defined(DIE) && !defined(NO_WATCH)
        :: !to && ANY(HAS_DIED) -> goto raise
#endif
#ifdef CLOSE
        :: d_step { !to && ANY(HAS_CLOSED) -> left_in_vain = 1; assert(!left_in_vain) }
#endif
#ifndef SWAP
        :: d_step { !to && ANY(IS_AHEAD) -> blamed_in_vain = 1; assert(!blamed_in_vain) }
#elif !defined(NO_CHECK)
        :: !to && ANY(IS_AHEAD) -> goto raise
#endif
        od;
#ifdef FAIL
        if :: goto FAIL :: true fi
#endif
    fi
    od;

raise:
    failed_at = (i < failed_at -> i : failed_at);
#ifndef NO_POISON
    do
    :: poison == ALL -> break
    :: d_step { poison != ALL -> poison = poison | (poison + 1) } /* the lowest rank that has not been told */
#ifdef DIE
    :: goto die
#endif
    od;
#endif
#ifdef DIE
    goto left;
die:
    failed_at = (i < failed_at -> i : failed_at);
    dead = dead | BIT(me);
#endif
    goto left;
ended:
    closed = closed | BIT(me);
left:
    skip
}

init {
    byte j;
    atomic {
        d_step { make_tables() }
#ifdef ANY_ORDER
        for (j : 0 .. OPS - 1) {
            if :: kinds[j] = C :: true fi
        };
#endif
        for (j : 0 .. N - 1) {
            run rank(j)
        }
    }
}
