/* Model of DEPTH ops under way in two levels: ranks end ops in the order in which they began, none waits for ever, and
 * what a proxy stages stays until its node has read it.
 *
 * Two nodes of two ranks. Each rank is the proxy of one of the other node's: it passes on what its client announces in a
 * dispatch-type op, and what its own node announces in a combine-type op, when it ends that op. For each rank whose bit
 * is in SERVED, a thread may do so before, once the op is under way and these have announced it. Of data, whose places
 * are those of two_level.pml in each channel, only staging is modelled; a signal is a bit per op.
 *
 * Must hold: no flag, ANY_ORDER, SERVED=ranks. Must be refuted:
 *   ANY_END             A rank ends any of its ops that are under way: two proxies wait for each other's passing on.
 *   SERVED=1 UNBEGUN    The thread serves an op that its rank has not begun, and stages over rows that are still read.
 *   SERVED=1 UNLOCKED   The rank serves, too, what the thread has begun; the thread then stages for an op that has ended.
 */
#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef OPS
#define OPS 6
#endif
#define N 4
#define BIT(p)    (1 << (p))
#define ALL       15
#define NODE(p)   (3 << ((p) & 2)) /* ranks of p's node */
#define CLIENT(p) ((p) ^ 2)        /* the rank that p is the proxy of */
#ifdef ANY_ORDER
bit kinds[OPS];
#define IS_DISPATCH(i) (!kinds[i])
#else
#define IS_DISPATCH(i) ((i) % 2 == 0)
#endif
/* Ranks that announce op i to p before any proxy takes part. */
#define DIRECT(i, p) (IS_DISPATCH(i) -> NODE(p) | BIT(CLIENT(p)) : NODE(p))

#if OPS > 6
#error OPS is at most 6
#endif
byte heard[6 * N]; /* ranks whose announcement of an op has come to a rank */
#define HEARD(i, p) heard[(i) * N + (p)]
#define DIRECTLY_HEARD(i, p, without) ((HEARD(i, p) | (without)) & DIRECT(i, p)) == DIRECT(i, p)
byte open[N];        /* ops of a rank that are under way, a bit each */
byte taken[N];       /* ops that the rank, or its thread, passes on or has passed on */
byte done[N];        /* ops that it has passed on */
byte staged[N * DEPTH]; /* 1 + the op whose rows a proxy has staged in a channel */
#define STAGED(i, p) staged[((i) % DEPTH) * N + (p)]
bit staging_overwritten;

inline announce(i) {
    for (q : 0 .. N - 1) {
        HEARD(i, q) = HEARD(i, q) | (DIRECT(i, q) & BIT(me))
    };
    q = 0
}

inline pass_on(i) {
    if
    :: IS_DISPATCH(i) ->
        STAGED(i, me) = i + 1;
        HEARD(i, me ^ 1) = HEARD(i, me ^ 1) | BIT(CLIENT(me))
    :: else -> HEARD(i, CLIENT(me)) = HEARD(i, CLIENT(me)) | NODE(me)
    fi;
    done[me] = done[me] | BIT(i)
}

inline read_staging(i) {
    staging_overwritten = IS_DISPATCH(i) && (STAGED(i, me) != i + 1 || STAGED(i, me ^ 1) != i + 1);
    assert(!staging_overwritten)
}

#ifdef UNBEGUN
#define MAY_SERVE(i, p) DIRECTLY_HEARD(i, p, BIT(p))
#else
#define MAY_SERVE(i, p) (open[p] & BIT(i)) && DIRECTLY_HEARD(i, p, 0)
#endif
#ifdef UNLOCKED
#define LEFT_TO(i, p) !(done[p] & BIT(i))
#else
#define LEFT_TO(i, p) !(taken[p] & BIT(i))
#endif

hidden byte q;

proctype rank(byte me) {
    byte begun, ended, at;

    do
    :: begun < OPS && (begun < DEPTH || !(open[me] & BIT(begun - DEPTH))) ->
        d_step { announce(begun); open[me] = open[me] | BIT(begun); begun++ }
    :: open[me] ->
#ifdef ANY_END
        at = 0;
        do
        :: !(open[me] & BIT(at)) -> at++
        :: (open[me] & BIT(at)) && (open[me] >> (at + 1)) -> at++
        :: (open[me] & BIT(at)) -> break
        od;
#else
        at = ended;
#endif
        if
        :: d_step { LEFT_TO(at, me) && DIRECTLY_HEARD(at, me, 0) -> taken[me] = taken[me] | BIT(at); pass_on(at) }
        :: done[me] & BIT(at)
        fi;
        d_step { HEARD(at, me) == ALL -> read_staging(at) };
        d_step { read_staging(at); open[me] = open[me] & ~BIT(at); ended++; at = 0 }
    :: ended == OPS -> break
    od
}

#ifdef SERVED
#define SERVE(i)                                                                     \
    :: d_step {                                                                      \
        !at && i < OPS && (MAY_SERVE(i, me)) && !(taken[me] & BIT(i)) ->             \
        taken[me] = taken[me] | BIT(i);                                              \
        at = i + 1                                                                   \
    }
proctype server(byte me) {
    byte at; /* 1 + the op that it passes on next */
end:
    do
    SERVE(0) SERVE(1) SERVE(2) SERVE(3) SERVE(4) SERVE(5)
    :: d_step { at -> pass_on(at - 1); at = 0 }
    od
}
#endif

init {
    byte j;
    atomic {
#ifdef ANY_ORDER
        for (j : 0 .. OPS - 1) {
            if :: kinds[j] = 1 :: true fi
        };
#endif
        for (j : 0 .. N - 1) {
            run rank(j);
#ifdef SERVED
            if :: SERVED & BIT(j) -> run server(j) :: else fi
#endif
        }
    }
}
