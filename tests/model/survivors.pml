/* Model of going on without the dead (moe_rt/elastic.py): who is left is decided once, and old memory is left alone.
 *
 * Every rank is in the middle of the old group's last op: it writes rows into its peers' segments, and at any moment
 * finds out that the group has ended, or ends itself, or stops for ever. Between any two steps it may be held up for as
 * long as one likes, so a rank that the others have given up may still write. Those that are left run one op of the new
 * group.
 *
 * Timeouts have no length here: a wait that has one may end at any moment. What is left out: asking once more after a
 * new group that was not formed, which begins with fresh keys.
 *
 * Must hold: no flag. Must be refuted:
 *   NO_DECISION     Each rank goes by the marks that it has seen itself.
 *   NO_TIMEOUT      Marks are waited for without an end.
 *   REUSE_SEGMENTS  The new group's windows lie in the old group's segments.
 */
#define N      3
#define BIT(p) (1 << (p))
#define ALL    (BIT(N) - 1)

/* Ranks of the new group are numbered anew, and a source's number says where in a segment it writes. */
#define NUMBER(p) (((p) > 0 && (left & BIT(0)) -> 1 : 0) + ((p) > 1 && (left & BIT(1)) -> 1 : 0))
#ifdef REUSE_SEGMENTS
#define GENERATION 0
#else
#define GENERATION 1
#endif
#define ROW(generation, owner, source) row[((generation) * N + (owner)) * N + (source)]
#define OLD 1
#define NEW 2

byte row[2 * N * N];
byte signal[N]; /* of the new group: in whose segment, from whom */
byte here, decision, joined; /* in the store: marks, who is left, who has come to the new group */
byte dead;                   /* ranks whose process has ended, as the others can see */

byte went_on; /* a ghost: with whom the first to go on has gone on */
hidden byte p, two_groups, zombie_overwrote_row; /* set and read within one d_step */

#define MAY_FAIL if :: true :: goto die :: goto stopped fi

proctype rank(byte me) {
    byte left, i;

    for (i : 0 .. N - 1) {
        if :: ROW(0, i, me) = OLD :: true -> break fi
    };
    MAY_FAIL;
    here = here | BIT(me);
    if
    :: (here | dead) == ALL
    :: decision != 0
#ifndef NO_TIMEOUT
    :: true
#endif
    fi;
    left = here & ~dead;
#ifndef NO_DECISION
    decision = (decision == 0 -> left : decision); /* the store's compare_set */
    left = decision;
#endif
    if :: left & BIT(me) :: else -> goto out fi;

    MAY_FAIL;
    joined = joined | BIT(me);
    if :: (joined & left) == left :: goto out fi;
    d_step {
        went_on = (went_on == 0 -> left : went_on);
        two_groups = went_on != left;
        assert(!two_groups)
    }

    for (i : 0 .. N - 1) {
        d_step { /* a row that is overwritten before its signal is as wrong as one overwritten after it */
            ROW(GENERATION, i, NUMBER(me)) = (left & BIT(i) -> NEW : ROW(GENERATION, i, NUMBER(me)));
            signal[i] = signal[i] | BIT(me)
        }
    };
    if :: (signal[me] & left) == left :: goto out fi;
    d_step {
        for (p : 0 .. N - 1) {
            zombie_overwrote_row = (left & BIT(p)) && ROW(GENERATION, me, NUMBER(p)) != NEW;
            assert(!zombie_overwrote_row)
        };
        p = 0
    }
    goto out;

die:
    dead = dead | BIT(me);
    goto out;
stopped:
end_stopped:
    false;
out:
    left = 0
}

init {
    byte j;
    atomic {
        for (j : 0 .. N - 1) {
            run rank(j)
        }
    }
}
