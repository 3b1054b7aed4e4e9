/* Model of DEPTH ops under way: ranks begin ops in one order, each rank ends them when it likes, no buffer is reused
 * early. What is left out is what protocol.pml leaves out.
 *
 * Op i runs in channel i % DEPTH, which has its own signals, headers and two windows of each kind. It may begin once op
 * i - DEPTH has ended. A rank that has begun some ops may end the oldest, or begin another.
 *
 * Must hold: no flag, ANY_ORDER, and
 *   POOL      Op i uses window i % (2 * DEPTH) of its kind, whatever its channel.
 *   ANY_END   A rank ends any of its ops that are under way (on one node; see depth_nodes.pml).
 *   REFUSE    A rank may refuse an op: all ranks see that in this op.
 *   RAISE     A rank may leave at any moment, and poisons its peers, which every wait polls.
 * Must be refuted:
 *   FEWER             2 * DEPTH - 1 windows, which take turns.
 *   ONE_MORE          An op begins while DEPTH others are under way.
 *   ANY_END COUNTED   An op begins while fewer than DEPTH others are under way, one of which is older than DEPTH ops.
 *   ONE_CHANNEL       All ops share two headers and the signals of one channel.
 *   RAISE NO_POISON   A rank leaves without telling those who wait for it.
 */
#ifndef N
#define N 2 /* ranks: 2 or 3 */
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef RUN
#define RUN 1 /* dispatches in a row, and combines */
#endif
#ifndef OPS
#define OPS 8
#endif

#define D 0
#define C 1
#ifdef ANY_ORDER
#define KIND(i) kinds[i]
bit kinds[OPS]; /* drawn before the run */
#else
#define KIND(i) (((i) / RUN) % 2)
#endif
#define BIT(p) (1 << (p))
#define ALL    (BIT(N) - 1)

#ifdef ONE_CHANNEL
#define CHANNEL(i) 0
#else
#define CHANNEL(i) ((i) % DEPTH)
#endif
#if defined(FEWER)
#define WINDOWS   (2 * DEPTH - 1)
#define WINDOW(i) ((i) % WINDOWS)
#elif defined(POOL)
#define WINDOWS   (2 * DEPTH)
#define WINDOW(i) ((i) % WINDOWS)
#else
#define WINDOWS   (2 * DEPTH)
#define WINDOW(i) turn[i]
#endif

#ifdef ONE_MORE
#define MAY_BEGIN (begun - ended <= DEPTH)
#elif defined(COUNTED)
#define MAY_BEGIN (num_open < DEPTH)
#else
#define MAY_BEGIN (begun < DEPTH || !(open & BIT(begun - DEPTH)))
#endif

byte seq[OPS], turn[OPS]; /* set before the run, by the order of ops alone */
#define PLACE(i, dst, src)  ((((KIND(i) * DEPTH + CHANNEL(i)) * N) + (dst)) * N + (src))
#define SIG(i, dst, src)    sig[PLACE(i, dst, src)]
#define HEADER(i, dst, src) hdr[2 * PLACE(i, dst, src) + seq[i] % 2]
/* A dispatch writes one window in the source, a combine one per source in the destination. */
#define SLOT(i, dst, src)   payload[(KIND(i) == D -> WINDOW(i) * N + (src) : (WINDOWS + WINDOW(i) * N + (dst)) * N + (src))]
#define BEGUN(i) (2 * (i) + 2)
#define DONE(i)  (2 * (i) + 3)
#define HDR(i)   (2 * (i) + 2 + refuse)

byte payload[WINDOWS * N + WINDOWS * N * N];
byte sig[2 * DEPTH * N * N], hdr[4 * DEPTH * N * N];
bit poison[N], truth[OPS]; /* truth: a rank refused the op; for the asserts alone */
byte failed_at = OPS;

hidden byte q, reads, found;
hidden byte tokens_overwritten, tokens_not_ready, partials_overwritten, partials_not_ready, other_op_announced;
hidden byte refusal_missed, completed_past_failure;

#define HEARD(i, p)  ((p) >= N || (p) == me || SIG(i, me, p) >= seq[i])
#define HEARD_ALL(i) (HEARD(i, 0) && HEARD(i, 1) && HEARD(i, 2))

#ifdef RAISE
#define MAY_RAISE if :: true :: goto raise fi
#else
#define MAY_RAISE skip
#endif

/* Asserts that every header, and every payload unless its rank refused, is complete and of op i. */
inline look(i) {
    for (q : 0 .. N - 1) {
        if
        :: q != me ->
            saw = saw | (HEADER(i, me, q) & 1);
            reads = !(HEADER(i, me, q) & 1);
            other_op_announced = HEADER(i, me, q) / 2 != i + 1;
            found = SLOT(i, me, q);
            tokens_overwritten = reads && KIND(i) == D && found > DONE(i);
            tokens_not_ready = reads && KIND(i) == D && found < DONE(i);
            partials_overwritten = reads && KIND(i) == C && found > DONE(i);
            partials_not_ready = reads && KIND(i) == C && found < DONE(i);
            assert(!tokens_overwritten);
            assert(!tokens_not_ready);
            assert(!partials_overwritten);
            assert(!partials_not_ready);
            assert(!other_op_announced)
        :: else
        fi
    };
    q = 0
}

/* The next step towards peer p: the begin of a push, or its end with the header and the signal. */
inline announce(p) {
    if
    :: KIND(begun) == C && !refuse && !(pushed & BIT(p)) ->
        pushed = pushed | BIT(p);
        SLOT(begun, p, me) = BEGUN(begun)
    :: else ->
        SLOT(begun, p, me) = (pushed & BIT(p) -> DONE(begun) : SLOT(begun, p, me));
        HEADER(begun, p, me) = HDR(begun);
        SIG(begun, p, me) = seq[begun];
        sent = sent | BIT(p)
    fi
}

proctype rank(byte me) {
    byte begun, ended, num_open, sent, pushed, at;
    short open;
    bit refuse, saw, mine[OPS];

    do
    :: begun < OPS && MAY_BEGIN ->
        MAY_RAISE;
        refuse = 0;
#ifdef REFUSE
        if :: refuse = 1 :: true fi;
        d_step { truth[begun] = truth[begun] | refuse; mine[begun] = refuse };
#endif
        if :: KIND(begun) == D && !refuse -> SLOT(begun, me, me) = BEGUN(begun) :: else fi;
        d_step {
            SLOT(begun, me, me) = (KIND(begun) == D && !refuse -> DONE(begun) : SLOT(begun, me, me));
            sent = BIT(me);
            pushed = 0
        };
        do
        :: d_step { !(sent & BIT(0)) -> announce(0) }
        :: d_step { !(sent & BIT(1)) -> announce(1) }
#if N > 2
        :: d_step { !(sent & BIT(2)) -> announce(2) }
#endif
#ifdef RAISE
        :: sent != ALL -> goto raise
#endif
        :: sent == ALL -> break
        od;
        open = open | BIT(begun);
        d_step { begun++; num_open++; sent = 0; pushed = 0; refuse = 0 }
    :: num_open > 0 ->
        MAY_RAISE;
#ifdef ANY_END
        at = 0;
        do
        :: !(open & BIT(at)) -> at++
        :: (open & BIT(at)) && (open >> (at + 1)) -> at++
        :: (open & BIT(at)) -> break
        od;
#else
        at = ended;
#endif
        if
        :: HEARD_ALL(at)
#if defined(RAISE) && !defined(NO_POISON)
        :: poison[me] -> goto left
#endif
        fi;
        d_step {
            saw = 0;
            look(at);
            saw = saw | mine[at];
            refusal_missed = saw != truth[at];
            assert(!refusal_missed)
        };
        if
        :: !saw -> MAY_RAISE; d_step { look(at) }
        :: saw
        fi;
        d_step {
            completed_past_failure = at >= failed_at + DEPTH;
            assert(!completed_past_failure);
            open = open & ~BIT(at);
            num_open--;
            ended++;
            at = 0;
            saw = 0
        }
    :: ended == OPS -> goto left
    od;

raise:
    /* It may have announced any op that it has begun, so that peers may complete that. */
    failed_at = (ended < failed_at -> ended : failed_at);
#ifndef NO_POISON
    for (at : 0 .. N - 1) { poison[at] = 1 };
#endif
left:
    skip
}

init {
    byte j, i;
    atomic {
#ifdef ANY_ORDER
        for (j : 0 .. OPS - 1) {
            if :: kinds[j] = C :: true fi
        };
#endif
        for (i : 0 .. OPS - 1) {
            seq[i] = 1;
            turn[i] = 2 * CHANNEL(i);
            for (j : 0 .. OPS - 1) {
                if
                :: j < i && CHANNEL(j) == CHANNEL(i) && KIND(j) == KIND(i) ->
                    seq[i] = seq[i] + 1;
                    turn[i] = turn[j] /* the next op of the channel takes the other window if it is of this kind */
                :: else
                fi
            };
            if
            :: i >= DEPTH && KIND(i - DEPTH) == KIND(i) -> turn[i] = 4 * CHANNEL(i) + 1 - turn[i]
            :: else
            fi
        };
        i = 0;
        for (j : 0 .. N - 1) { run rank(j) }
    }
}
