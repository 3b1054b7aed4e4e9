/* Model of the two ops, pull-dispatch and push-combine, to be checked exhaustively: buffers are reused without acks.
 *
 * Every rank runs the same chain of OPS ops: RUN dispatches, RUN combines, RUN dispatches, ... (RUN=1 is a training
 * step: dispatch, combine, combine-backward, dispatch-backward; RUN=2 is two micro-batches in flight). Each kind has
 * its own sequence number, its own signals and its own two windows, which take turns where two ops of a kind follow each
 * other. Ranks are free-running: nothing but a missing signal holds one back. With ANY_ORDER kinds follow in any order.
 *
 * What is left out, and why the result still stands:
 *  - Memory order. Spin is sequentially consistent; release and acquire are for race and litmus tests to check.
 *  - Payload values. A window holds the number of the op it was written for: that is all that can go wrong with it.
 *  - Zero tokens, unless ROUTES is set. A reader only asserts, so a run in which it reads less is one with fewer
 *    asserts: tokens between every pair are the worst case. Where zero tokens decide who waits for whom (SKIP_ZERO)
 *    they matter: ROUTES=r draws r routings before the run, which the dispatches use in turn; combine n carries the
 *    reverse of dispatch n.
 *  - What a dispatch pushes, unless PUSHED is set: a dispatch is then its pushed lists and rows, in the destination's window.
 *
 * Must hold: no flag, ROUTES=r, PUSHED, and
 *   REFUSE  A rank may refuse its input. It announces that in place of data, waits like everybody, and all go on.
 *   RAISE   A rank may raise at any moment and leave for good; it poisons its peers' memory, which every wait polls.
 *   DIE     A rank's process may end at any moment, also while it poisons; every wait sees whether its peer has ended.
 *   SWAP    Rank 1 issues its first two dispatches in the other order; every header says which call it announces.
 *   LEAVE   Like REFUSE, but whoever refuses, or learns of a refusal, raises and leaves.
 * Must be refuted (D|C names the kind of op that is spoilt):
 *   ROUTES=r SKIP_ZERO            Peers that exchange no tokens neither signal nor wait for each other.
 *   SINGLE_WINDOW=D|C             One window instead of two, whatever follows what.
 *   EARLY_SIGNAL=D|C              The signal comes before the data.
 *   PER_LAYER                     Each layer counts its own ops, but layers share the windows.
 *   REFUSE NO_WAIT                A rank that refused its input returns without waiting for its peers.
 *   RAISE|LEAVE NO_POISON         A rank leaves without telling those who wait for it.
 *   DIE NO_WATCH                  Nobody looks whether a peer's process has ended.
 *   SWAP NO_CHECK                 Headers are not compared with the reader's own call.
 */
#ifndef N
#define N 3 /* ranks: 2, 3 or 4 */
#endif
#ifndef RUN
#define RUN 1
#endif
#ifndef OPS
#define OPS 8
#endif

#include "windows.pml"

#if defined(RAISE) || defined(DIE) || defined(SWAP) || defined(LEAVE)
#define FAILS
#endif
#ifdef RAISE
#define FAIL raise
#elif defined(DIE)
#define FAIL die
#endif
#ifdef FAIL
#define MAY_FAIL if :: true :: goto FAIL fi
#else
#define MAY_FAIL skip
#endif

proctype rank(byte me) {
    byte i, u, begun, sent, lost, count[2];
    bit k, refuse, saw, window[2];
    byte before = NO_KIND;

    do
    :: i == OPS -> goto left
    :: i < OPS && KIND(i) == C && (lost & BIT(i % RUN)) ->
        /* Its dispatch was refused, so there is no handle to combine with. Ranks that disagree on that would hang. */
        lost = lost - BIT(i % RUN);
        i++
    :: else ->
        d_step { /* local */
            k = KIND(i);
            count[k]++;
            u = count[k];
            window[k] = WINDOW;
            before = k;
            begun = 0;
            sent = BIT(me);
            refuse = 0;
            saw = 0;
#ifdef SKIP_ZERO
            for (q : 0 .. N - 1) {
                sent = sent | (TALKS(me, q) -> 0 : BIT(q))
            };
            q = 0
#endif
        }
        MAY_FAIL;
#ifdef LEAVE
        /* Fail fast: a peer's refusal may be known before this rank has announced anything. */
        d_step {
            for (q : 0 .. N - 1) {
                saw = saw | (q != me && SIG(me, q) >= SEQ && hdr[HEADER(me, q)] == HDR(1))
            };
            q = 0
        }
        if :: saw -> goto raise :: else fi;
#endif
#if defined(REFUSE) || defined(LEAVE)
        if :: refuse = 1 :: true fi;
        TRUTH = (TRUTH > HDR(refuse) -> TRUTH : HDR(refuse));
#endif

        /* Announce. */
        if :: !PUSHES && !refuse && !EARLY(D) -> payload[SLOT(me, me)] = BEGUN :: else fi;
        MAY_FAIL;
        if
        :: !PUSHES ->
            d_step { /* a peer that looked between the two would be as wrong as one that looks before */
                payload[SLOT(me, me)] = (refuse || EARLY(D) -> payload[SLOT(me, me)] : DONE);
                hdr[HEADER(me, me)] = HDR(refuse);
                SAY_CALL
            }
        :: else
        fi;
        do /* destinations in any order, their pushes interleaved in any way */
        :: d_step { !(sent & BIT(0)) -> announce(0) }
        :: d_step { !(sent & BIT(1)) -> announce(1) }
#if N > 2
        :: d_step { !(sent & BIT(2)) -> announce(2) }
#endif
#if N > 3
        :: d_step { !(sent & BIT(3)) -> announce(3) }
#endif
#ifdef FAIL
        :: sent != ALL -> goto FAIL
#endif
        :: sent == ALL -> break
        od;
        if :: !PUSHES && EARLY(D) -> payload[SLOT(me, me)] = BEGUN; payload[SLOT(me, me)] = DONE :: else fi;
#ifdef LEAVE
        if :: refuse -> goto raise :: else fi;
#endif

        /* Wait. */
        MAY_FAIL;
        if
        :: HEARD_ALL
#if defined(FAILS) && !defined(NO_POISON)
        :: poison[me] -> goto left
#endif
#if defined(DIE) && !defined(NO_WATCH)
        :: LOST_ANY -> goto raise
#endif
#ifdef NO_WAIT
        :: refuse -> goto next
#endif
        fi;
#if defined(SWAP) && !defined(NO_CHECK)
        d_step {
            for (q : 0 .. N - 1) {
                saw = saw | OTHER_CALL(q)
            };
            q = 0
        }
        if :: saw -> goto raise :: else fi;
#endif

        /* Gather or reduce. One interval covers all peers, as rows are taken in expert order and not peer by peer. */
        d_step {
            look();
            saw = saw | refuse;
#ifdef REFUSE
            refusal_missed = TRUTH == HDR(!saw);
            assert(!refusal_missed)
#endif
        }
        if
        :: !saw ->
            MAY_FAIL;
            d_step { look() }
#ifdef LEAVE
        :: saw -> goto raise
#else
        :: saw
#endif
        fi;
#ifdef FAILS
        d_step {
            completed_past_failure = i > failed_at;
            assert(!completed_past_failure)
        }
#endif
next:
        lost = lost | (k == D && (saw || refuse) -> BIT(i % RUN) : 0);
        i++
    od;

raise:
    failed_at = (i < failed_at -> i : failed_at);
#ifndef NO_POISON
    for (u : 0 .. N - 1) {
#ifdef DIE
        MAY_FAIL;
#endif
        poison[u] = 1
    };
#endif
#ifdef DIE
    goto left;
die:
    failed_at = (i < failed_at -> i : failed_at);
    dead = dead | BIT(me);
#endif
left:
    skip
}

init {
    byte j;
    atomic {
#ifdef ANY_ORDER
        for (j : 0 .. OPS - 1) {
            if :: kinds[j] = C :: true fi
        };
#endif
#ifdef ROUTES
        for (j : 0 .. ROUTES * N * N - 1) {
            if :: j % N != j / N % N -> route[j] = 1 :: true fi
        };
#endif
        for (j : 0 .. N - 1) {
            run rank(j)
        }
    }
}
