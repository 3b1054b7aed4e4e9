/* Model of the two ops, pull-dispatch and push-combine, to be checked exhaustively: buffers are reused without acks.
 *
 * Every rank runs the same chain of OPS ops: RUN dispatches, RUN combines, RUN dispatches, ... (RUN=1 is a training
 * step: dispatch, combine, combine-backward, dispatch-backward; RUN=2 is two micro-batches in flight). Each kind has
 * its own sequence number, its own signals and its own windows, selected by the parity of the sequence number. Ranks
 * are free-running: nothing but a missing signal holds one back.
 *
 * What is left out, and why the result still stands:
 *  - Memory order. Spin is sequentially consistent; release and acquire are for race and litmus tests to check.
 *  - Payload values. A window holds the number of the op it was written for: that is all that can go wrong with it.
 *  - Zero tokens, unless ROUTES is set. A reader only asserts, so a run in which it reads less is one with fewer
 *    asserts: tokens between every pair are the worst case. Where zero tokens decide who waits for whom (SKIP_ZERO)
 *    they matter: ROUTES=r draws r routings before the run, which the dispatches use in turn; combine n carries the
 *    reverse of dispatch n.
 *
 * A d_step is one access to shared memory as a peer sees it, or a few that no peer can tell apart (the reason is then
 * given). None of them blocks or makes a choice.
 *
 * Must hold: no flag, ROUTES=r, and
 *   REFUSE  A rank may refuse its input. It announces that in place of data, waits like everybody, and all go on.
 *   RAISE   A rank may raise at any moment and leave for good; it poisons its peers' memory, which every wait polls.
 *   LEAVE   Like REFUSE, but whoever refuses, or learns of a refusal, raises and leaves.
 * Must be refuted (D|C names the kind of op that is spoilt):
 *   ROUTES=r SKIP_ZERO            Peers that exchange no tokens neither signal nor wait for each other.
 *   SINGLE_WINDOW=D|C             One window instead of two.
 *   EARLY_SIGNAL=D|C              The signal comes before the data.
 *   PER_LAYER                     Each layer counts its own ops, but layers share the windows.
 *   REFUSE NO_WAIT                A rank that refused its input returns without waiting for its peers.
 *   RAISE|LEAVE NO_POISON         A rank leaves without telling those who wait for it.
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

#define D       0
#define C       1
#define KIND(i) (((i) / RUN) % 2)
#define BIT(p)  (1 << (p))
#define ALL     (BIT(N) - 1)

/* u counts the ops of one kind from 1 in every variant: it is the truth that windows are checked against. The sequence
 * number and the half of the window follow from u in the way that the variant believes in. */
#ifdef PER_LAYER
#define LAYERS 2 /* two layers take turns, each with its own counter and signals; they share the windows */
#define LAYER  ((u + 1) % 2)
#define SEQ    ((u + 1) / 2)
#else
#define LAYERS 1
#define LAYER  0
#define SEQ    u
#endif
#ifdef SINGLE_WINDOW
#define HALF (k == SINGLE_WINDOW -> 0 : SEQ % 2)
#else
#define HALF (SEQ % 2)
#endif
#ifdef EARLY_SIGNAL
#define EARLY(kind) (kind == EARLY_SIGNAL)
#else
#define EARLY(kind) false
#endif

/* A dispatch writes one window in the source, whoever reads it; a combine writes one per source in the destination. */
#define SLOTS          (2 * N + 2 * N * N)
#define SLOT(dst, src) ((k == D -> 2 * (src) : 2 * N + 2 * ((dst) * N + (src))) + HALF)
#define SIG(dst, src)  sig[((k * LAYERS + LAYER) * N + (dst)) * N + (src)]
#define BEGUN          (2 * u)     /* payload of op u while it is being written */
#define DONE           (2 * u + 1) /* payload of op u, complete */
#define HDR(refusal)   (2 * u + (refusal))

byte payload[SLOTS];
byte hdr[SLOTS];
byte sig[2 * LAYERS * N * N]; /* stored by src, lies in dst, never decreases */
bit poison[N];

#ifdef ROUTES
bit route[ROUTES * N * N];
#define ROUTE(src, dst)  route[((u - 1) % ROUTES * N + (src)) * N + (dst)]
#define TOKENS(src, dst) (k == D -> ROUTE(src, dst) : ROUTE(dst, src))
#else
#define TOKENS(src, dst) true
#endif
#ifdef SKIP_ZERO
#define TALKS(src, dst) TOKENS(src, dst)
#else
#define TALKS(src, dst) true
#endif

/* One guard for all peers, where the real wait visits them one by one: signals never decrease, so both end alike. */
#define HEARD(p) (p >= N || p == me || !TALKS(p, me) || SIG(me, p) >= SEQ)
#define HEARD_ALL (HEARD(0) && HEARD(1) && HEARD(2) && HEARD(3))

#if defined(RAISE) || defined(LEAVE)
#define FAILS
#endif
#ifdef RAISE
#define MAY_RAISE if :: true :: goto raise fi
#else
#define MAY_RAISE skip
#endif

/* Ghosts, for the asserts alone. */
byte failed_at = OPS; /* the first op in which a rank failed */
byte truth[4];        /* HDR(somebody refused it) of the newest op, by kind and parity */
#define TRUTH truth[2 * k + u % 2]

/* The verifier's message repeats the assert, so the property's name is in it. These, and scratch variables, are set
 * and read within one d_step: they need not be part of the state. */
hidden byte tokens_overwritten, tokens_not_ready, partials_overwritten, partials_not_ready;
hidden byte refusal_missed, completed_past_failure;
hidden byte q, s, reads, newer, older;

/* The next step towards peer p: a signal, and for a combine the push before it. The end of the push, the header and
 * the signal are merged: p alone looks there, and a p that looked in between would be as wrong as one that sees the
 * half-written payload just before. */
inline announce(p) {
    s = SLOT(p, me);
    if
    :: k == C && !refuse && TOKENS(me, p) && !(begun & BIT(p)) ->
        begun = begun | BIT(p);
        if :: EARLY(C) -> hdr[s] = HDR(refuse); SIG(p, me) = SEQ :: else -> payload[s] = BEGUN fi
    :: else ->
        payload[s] = (begun & BIT(p) -> DONE : payload[s]);
        hdr[s] = (k == C -> HDR(refuse) : hdr[s]);
        SIG(p, me) = SEQ;
        sent = sent | BIT(p)
    fi
}

/* Asserts that every header, and every payload unless its rank refused, is complete and of op u. */
inline look() {
    for (q : 0 .. N - 1) {
        if
        :: q != me && TALKS(q, me) ->
            s = SLOT(me, q);
            saw = saw | (hdr[s] & 1);
            reads = TOKENS(q, me) && !(hdr[s] & 1);
            newer = hdr[s] / 2 > u || (reads && payload[s] > DONE);
            older = hdr[s] / 2 < u || (reads && payload[s] < DONE);
            tokens_overwritten = k == D && newer;
            tokens_not_ready = k == D && older;
            partials_overwritten = k == C && newer;
            partials_not_ready = k == C && older;
            assert(!tokens_overwritten);
            assert(!tokens_not_ready);
            assert(!partials_overwritten);
            assert(!partials_not_ready)
        :: else
        fi
    };
    q = 0 /* spin wants no loop at the end of a d_step */
}

proctype rank(byte me) {
    byte i, u, begun, sent, lost, count[2];
    bit k, refuse, saw;

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
        MAY_RAISE;
#ifdef LEAVE
        /* Fail fast: a peer's refusal may be known before this rank has announced anything. */
        d_step {
            for (q : 0 .. N - 1) {
                saw = saw | (q != me && SIG(me, q) >= SEQ && hdr[SLOT(me, q)] == HDR(1))
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
        if :: k == D && !refuse && !EARLY(D) -> payload[SLOT(me, me)] = BEGUN :: else fi;
        MAY_RAISE;
        if
        :: k == D ->
            d_step { /* a peer that looked between the two would be as wrong as one that looks before */
                payload[SLOT(me, me)] = (refuse || EARLY(D) -> payload[SLOT(me, me)] : DONE);
                hdr[SLOT(me, me)] = HDR(refuse)
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
#ifdef RAISE
        :: sent != ALL -> goto raise
#endif
        :: sent == ALL -> break
        od;
        if :: k == D && EARLY(D) -> payload[SLOT(me, me)] = BEGUN; payload[SLOT(me, me)] = DONE :: else fi;
#ifdef LEAVE
        if :: refuse -> goto raise :: else fi;
#endif

        /* Wait. */
        MAY_RAISE;
        if
        :: HEARD_ALL
#if defined(FAILS) && !defined(NO_POISON)
        :: poison[me] -> goto left
#endif
#ifdef NO_WAIT
        :: refuse -> goto next
#endif
        fi;

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
            MAY_RAISE;
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
    for (i : 0 .. N - 1) {
        poison[i] = 1
    };
#endif
left:
    skip
}

init {
    byte j;
    atomic {
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
