/* What the ranks of protocol.pml share: windows, headers, signals, poison; how they are written, and how looked at.
 *
 * A d_step is one access to shared memory as a peer sees it, or a few that no peer can tell apart (the reason is then
 * given). None of them blocks or makes a choice.
 */
#define D       0
#define C       1
#define NO_KIND 2
#ifdef ANY_ORDER
#define KIND(i) kinds[i]
bit kinds[OPS]; /* drawn before the run; all ranks issue the same ops in the same order */
#else
#define KIND(i) (((i) / RUN) % 2)
#endif
#define BIT(p)  (1 << (p))
#define ALL     (BIT(N) - 1)

/* u counts the ops of one kind from 1 in every variant: it is the truth that windows are checked against. The sequence
 * number and which of two windows is used follow in the way that the variant believes in. */
#ifdef PER_LAYER
#define LAYERS 2 /* two layers take turns, each with its own counter and signals; they share the windows */
#define LAYER  ((u + 1) % 2)
#define SEQ    ((u + 1) / 2)
#else
#define LAYERS 1
#define LAYER  0
#define SEQ    u
#endif
/* The next op's window: after an op of the other kind that of the last one of this kind, else the other. */
#define TURN (before == k -> 1 - window[k] : window[k])
#ifdef PER_LAYER
#define WINDOW (SEQ % 2)
#elif defined(SINGLE_WINDOW)
#define WINDOW (k == SINGLE_WINDOW -> 0 : TURN)
#else
#define WINDOW TURN
#endif
#ifdef EARLY_SIGNAL
#define EARLY(kind) (kind == EARLY_SIGNAL)
#else
#define EARLY(kind) false
#endif

/* A dispatch writes one window in the source, whoever reads it; a combine writes one per source in the destination, and
 * so does a dispatch that pushes. Headers have two places each, too, and always take turns. */
#ifdef PUSHED
#define SLOTS            (4 * N * N)
#define PLACES(dst, src) (2 * ((k * N + (dst)) * N + (src)))
#define PUSHES           true
#else
#define SLOTS            (2 * N + 2 * N * N)
#define PLACES(dst, src) (k == D -> 2 * (src) : 2 * N + 2 * ((dst) * N + (src)))
#define PUSHES           (k == C)
#endif
#define SLOT(dst, src)   (PLACES(dst, src) + window[k])
#define HEADER(dst, src) (PLACES(dst, src) + SEQ % 2)
#define SIG(dst, src)  sig[((k * LAYERS + LAYER) * N + (dst)) * N + (src)]
#define BEGUN          (2 * u)     /* payload of op u while it is being written */
#define DONE           (2 * u + 1) /* payload of op u, complete */
#define HDR(refusal)   (2 * u + (refusal))

byte payload[SLOTS];
byte hdr[SLOTS];
byte sig[2 * LAYERS * N * N]; /* stored by src, lies in dst, never decreases */
bit poison[N];
byte dead; /* ranks whose process has ended, as their peers can see */
#ifdef SWAP
bit call[SLOTS]; /* in the header: which call is announced, layers taking turns */
#define CALL          (u % 2 ^ (me == 1 && k == D && u <= 2))
#define SAY_CALL      call[HEADER(me, me)] = CALL
#define OTHER_CALL(q) (k == D && call[HEADER(me, q)] != CALL)
#else
#define SAY_CALL      skip
#define OTHER_CALL(q) false
#endif

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
#define LOST(p)   ((dead & BIT(p)) && !HEARD(p))
#define LOST_ANY  (LOST(0) || LOST(1) || LOST(2) || LOST(3))

/* Ghosts, for the asserts alone. */
byte failed_at = OPS; /* the first op in which a rank failed */
byte truth[4];        /* HDR(somebody refused it) of the newest op, by kind and parity */
#define TRUTH truth[2 * k + u % 2]

/* The verifier's message repeats the assert, so the property's name is in it. These, and scratch variables, are set
 * and read within one d_step: they need not be part of the state. */
hidden byte tokens_overwritten, tokens_not_ready, partials_overwritten, partials_not_ready;
hidden byte refusal_missed, completed_past_failure, other_call_consumed;
hidden byte q, s, h, reads, newer, older;

/* The next step towards peer p: a signal, and for an op that pushes the push before it. The end of the push, the header and
 * the signal are merged: p alone looks there, and a p that looked in between would be as wrong as one that sees the
 * half-written payload just before. */
inline announce(p) {
    s = SLOT(p, me);
    h = HEADER(p, me);
    if
    :: PUSHES && !refuse && TOKENS(me, p) && !(begun & BIT(p)) ->
        begun = begun | BIT(p);
        if :: EARLY(k) -> hdr[h] = HDR(refuse); SIG(p, me) = SEQ :: else -> payload[s] = BEGUN fi
    :: else ->
        payload[s] = (begun & BIT(p) -> DONE : payload[s]);
        hdr[h] = (PUSHES -> HDR(refuse) : hdr[h]);
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
            h = HEADER(me, q);
            saw = saw | (hdr[h] & 1);
            reads = TOKENS(q, me) && !(hdr[h] & 1);
            newer = hdr[h] / 2 > u || (reads && payload[s] > DONE);
            older = hdr[h] / 2 < u || (reads && payload[s] < DONE);
            tokens_overwritten = k == D && newer;
            tokens_not_ready = k == D && older;
            partials_overwritten = k == C && newer;
            partials_not_ready = k == C && older;
            other_call_consumed = OTHER_CALL(q);
            assert(!other_call_consumed);
            assert(!tokens_overwritten);
            assert(!tokens_not_ready);
            assert(!partials_overwritten);
            assert(!partials_not_ready)
        :: else
        fi
    };
    q = 0 /* spin wants no loop at the end of a d_step */
}
