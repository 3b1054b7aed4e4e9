/* Model of DEPTH ops under way in two levels: ranks end ops in the order in which they began, and none waits for ever.
 *
 * Two nodes of two ranks. Each rank is the proxy of one of the other node's: it passes on what its client announces in a
 * dispatch-type op, and what its own node announces in a combine-type op, when it ends that op. Data, whose places are
 * those of two_level.pml in each channel, is left out: a signal is a bit per op.
 *
 * Must hold: no flag, ANY_ORDER. Must be refuted:
 *   ANY_END   A rank ends any of its ops that are under way: two proxies wait for each other's passing on.
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

byte heard[OPS * N]; /* ranks whose announcement of an op has come to a rank */
#define HEARD(i, p) heard[(i) * N + (p)]

inline announce(i) {
    for (q : 0 .. N - 1) {
        HEARD(i, q) = HEARD(i, q) | (DIRECT(i, q) & BIT(me))
    };
    q = 0
}

inline pass_on(i) {
    if
    :: IS_DISPATCH(i) -> HEARD(i, me ^ 1) = HEARD(i, me ^ 1) | BIT(CLIENT(me))
    :: else -> HEARD(i, CLIENT(me)) = HEARD(i, CLIENT(me)) | NODE(me)
    fi
}

hidden byte q;

proctype rank(byte me) {
    byte begun, ended, at;
    byte open;

    do
    :: begun < OPS && (begun < DEPTH || !(open & BIT(begun - DEPTH))) ->
        d_step { announce(begun); open = open | BIT(begun); begun++ }
    :: open ->
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
        (HEARD(at, me) & DIRECT(at, me)) == DIRECT(at, me);
        d_step { pass_on(at) };
        HEARD(at, me) == ALL;
        d_step { open = open & ~BIT(at); ended++; at = 0 }
    :: ended == OPS -> break
    od
}

init {
    byte j;
    atomic {
#ifdef ANY_ORDER
        for (j : 0 .. OPS - 1) {
            if :: kinds[j] = 1 :: true fi
        };
#endif
        for (j : 0 .. N - 1) { run rank(j) }
    }
}
