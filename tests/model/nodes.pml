/* What the ranks of two_level.pml share: nodes, who announces what to whom, windows, and how they are looked at.
 *
 * A d_step is one access to shared memory as a peer sees it, or several of which no peer can tell the order: a write
 * begins as early as its rank may write and ends with the signal that announces it; a read takes from the end of the
 * wait for what is read until its rank's next signal or op. None of them blocks or makes a choice.
 */
#if NODES == 22
#define N        4
#define NODE(r)  ((r) / 2)
#define SIZE(m)  2
#elif NODES == 111
#define N        3
#define NODE(r)  (r)
#define SIZE(m)  1
#elif NODES == 12
#define N        3
#define NODE(r)  ((r) > 0)
#define SIZE(m)  (1 + (m))
#elif NODES == 13
#define N        4
#define NODE(r)  ((r) > 0)
#define SIZE(m)  (1 + 2 * (m))
#endif
#define FIRST(m) ((m) * SIZE(0)) /* no node but the last has another size than the first */

#define D        0
#define C        1
#define NO_KIND  2
#define BIT(p)   (1 << (p))
#define ALL      (BIT(N) - 1)
#ifdef ANY_ORDER
#define KIND(i)  kinds[i]
bit kinds[OPS]; /* drawn before the run; all ranks issue the same ops in the same order */
#elif defined(SWAP)
#define KIND(i)  ((i) % 2 ^ (me == 1 && (i) < 2))
#else
#define KIND(i)  (((i) / RUN) % 2)
#endif

/* Tables and sets of ranks that stay as init makes them. */
#define FORWARDER(m, s) (FIRST(m) + ((s) - FIRST(NODE(s))) % SIZE(m)) /* serves rank s of another node, on node m */
#define NEAR(p)   (near[me] & BIT(p))   /* of the same node; each rank is near to itself */
#define SERVED(p) (served[me] & BIT(p)) /* by me */
hidden byte near[N], served[N], tells[2 * N], passes[2 * N], orderly[N], announcer[2 * N * N];

inline make_tables() {
    for (q : 0 .. N - 1) {
        for (s : 0 .. N - 1) {
            if
            :: NODE(q) == NODE(s) ->
                near[q] = near[q] | BIT(s);
                announcer[q * N + s] = s;
                announcer[(N + q) * N + s] = s
            :: else ->
                served[q] = served[q] | (FORWARDER(NODE(q), s) == q -> BIT(s) : 0);
                announcer[q * N + s] = (FORWARDER(NODE(q), s) == q -> s : FORWARDER(NODE(q), s));
                announcer[(N + q) * N + s] = FORWARDER(NODE(s), q)
            fi
        }
    };
    for (q : 0 .. N - 1) {
        for (s : 0 .. N - 1) {
            /* Of its own op a rank tells neighbours and, if it is a dispatch, those that serve it. */
            tells[q] = tells[q] | (s != q && announcer[s * N + q] == q -> BIT(s) : 0);
            orderly[q] = orderly[q] | (announcer[q * N + s] == s && announcer[(N + q) * N + s] == s -> BIT(s) : 0)
        };
        tells[N + q] = near[q] - BIT(q);
        /* What it has heard of a dispatch it passes on to neighbours; to have staged rows for itself alone is a step, too. */
        passes[q] = (served[q] -> (near[q] == BIT(q) -> near[q] : near[q] - BIT(q)) : 0);
        passes[N + q] = served[q]
    };
    q = 0;
    s = 0
}

/* Windows, by the names that SINGLE and LATE know them by. Each cell has one writer. */
#define ROWS      0 /* what a rank dispatches, in its own segment; neighbours and forwarders read it */
#define STAGING   1 /* rows of a source, in the segment of its forwarder, who writes them; neighbours read them */
#define PARTIALS  2 /* for a source of the same node, in its segment */
#define FORWARDED 3 /* partials for a source of another node, in the segment of its forwarder here */
#define SUMS      4 /* of a node, in the segment of the source, written by its forwarder there */
#define NO_WINDOW 5
#ifndef SINGLE
#define SINGLE    NO_WINDOW
#endif
#ifndef LATE
#define LATE      NO_WINDOW
#endif
/* The next op's window: after an op of the other kind that of the last one of this kind, else the other. */
#define TURN          (before == k -> 1 - window[k] : window[k])
#define CELL(w)       (SINGLE == w -> 0 : window[k])
#define ROW(s)        rows[2 * (s) + CELL(ROWS)]
#define STAGED(s)     staging[NODE(me) * N + (s)] /* one window is enough */
#define PARTIAL(o, s) partials[2 * ((o) * N + (s)) + CELL(PARTIALS)]
#define FORWARD(o, s) forwarded[2 * ((o) * N + (s)) + CELL(FORWARDED)]
#define SUM(o, m)     sums[2 * ((o) * N + (m)) + CELL(SUMS)]
#define MAILBOX(o, s) ((k * N + (o)) * N + (s))
#define SIG(o, s)     sig[MAILBOX(o, s)]
#define HEADER(o, s)  hdr[2 * MAILBOX(o, s) + u % 2]
#define BEGUN         (2 * u)     /* in a cell while op u writes it */
#define DONE          (2 * u + 1) /* in a cell that is complete */
#define HDR(refusal)  (2 * u + (refusal))

byte rows[2 * N], staging[N * N], partials[2 * N * N], forwarded[2 * N * N], sums[2 * N * N];
byte hdr[4 * N * N];
byte sig[2 * N * N]; /* never decreases */
byte poison; /* ranks that have been told of a failure */
byte dead;   /* ranks whose process has ended, as all others can see */
byte closed; /* ranks that have run all ops */

#ifdef ONE_WAY
#define TOKENS(s, o) (k == C || NODE(s) == 0 || NODE(s) == NODE(o)) /* node 0 sends, and nobody sends to it */
#else
#define TOKENS(s, o) true
#endif
#ifdef SKIP_SILENT
#define TALKS(p)     TOKENS(p, me)
#else
#define TALKS(p)     true
#endif

/* What a wait that is not over finds out. A rank visits those that it waits for one by one, and looks at no other. */
#define UNHEARD(p)    ((awaited & BIT(p)) && SIG(me, p) < u)
#define VISITED(p)    (UNHEARD(p) && !((p) > 0 && UNHEARD(0)) && !((p) > 1 && UNHEARD(1)) && !((p) > 2 && UNHEARD(2)))
#define ANY(what)     (what(0) || what(1) || what(2) || what(3 % N))
#ifdef WATCH_SOURCE
#define WATCHED(p)    (p)
#else
#define WATCHED(p)    announcer[MAILBOX(me, p)]
#endif
#define HAS_DIED(p)   (VISITED(p) && (dead & BIT(WATCHED(p))))
#define HAS_CLOSED(p) (VISITED(p) && (closed & BIT(WATCHED(p))))
#ifdef ORDER_OF_ALL
#define ORDERLY(p)    true
#else
#define ORDERLY(p)    (orderly[me] & BIT(p)) /* it announces both kinds to me itself */
#endif
#define IS_AHEAD(p)   (VISITED(p) && ORDERLY(p) && sig[((1 - k) * N + me) * N + (p)] > count[1 - k])

/* Ghosts, for the asserts alone. */
byte failed_at = OPS; /* the first op in which a rank failed */
byte truth[4];        /* HDR(somebody refused it) of the newest op, by kind and parity */
#define TRUTH truth[2 * k + u % 2]

/* The verifier's message repeats the assert, so the property's name is in it. These, and scratch variables, are set
 * and read within one d_step: they need not be part of the state. */
hidden byte rows_overwritten, rows_not_ready, staging_overwritten, staging_not_ready;
hidden byte partials_overwritten, partials_not_ready, forwarded_overwritten, forwarded_not_ready;
hidden byte sums_overwritten, sums_not_ready;
hidden byte refusal_missed, completed_past_failure, left_in_vain, blamed_in_vain;
hidden byte q, s, cell;

inline judge(overwritten, not_ready) {
    overwritten = cell > DONE;
    not_ready = cell < DONE;
    assert(!overwritten);
    assert(!not_ready)
}

/* The headers of those ranks, each judged as the rows that it announces, and whether one of them refuses. */
inline look_at_headers(ranks) {
    saw = refuse;
    for (q : 0 .. N - 1) {
        if
        :: q != me && ((ranks) & BIT(q)) ->
            cell = HEADER(me, q) | 1;
            saw = saw | (HEADER(me, q) & 1);
            if
            :: k == D && (NEAR(q) || SERVED(q)) -> judge(rows_overwritten, rows_not_ready)
            :: k == D && !NEAR(q) && !SERVED(q) -> judge(staging_overwritten, staging_not_ready)
            :: k == C && NEAR(q) -> judge(partials_overwritten, partials_not_ready)
            :: k == C && !NEAR(q) -> judge(sums_overwritten, sums_not_ready)
            fi
        :: else
        fi
    };
    q = 0 /* spin wants no loop at the end of a d_step */
}

/* What a forwarder reads: of a dispatch the rows of those it serves, of a combine what neighbours have left for them. */
inline look_as_forwarder() {
    for (s : 0 .. N - 1) {
        if
        :: SERVED(s) && k == D && TOKENS(s, me) -> cell = ROW(s); judge(rows_overwritten, rows_not_ready)
        :: SERVED(s) && k == C ->
            for (q : 0 .. N - 1) {
                if
                :: q != me && NEAR(q) -> cell = FORWARD(s, q); judge(forwarded_overwritten, forwarded_not_ready)
                :: else
                fi
            }
        :: else
        fi
    };
    q = 0;
    s = 0
}

/* What a rank reads when it has heard of all. */
inline look() {
    for (q : 0 .. N - 1) {
        if
        :: q == me || !TOKENS(q, me)
        :: else ->
            if
            :: k == D && NEAR(q) -> cell = ROW(q); judge(rows_overwritten, rows_not_ready)
            :: k == D && !NEAR(q) && !SERVED(q) -> cell = STAGED(q); judge(staging_overwritten, staging_not_ready)
            :: k == C && NEAR(q) -> cell = PARTIAL(me, q); judge(partials_overwritten, partials_not_ready)
            :: k == C && !NEAR(q) -> cell = SUM(me, NODE(q)); judge(sums_overwritten, sums_not_ready)
            :: else
            fi
        fi
    };
    q = 0
}
