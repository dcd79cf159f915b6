"""The demo's prompts in the style of old books."""

from __future__ import annotations

PROMPTS = {
    "the-mill": (
        "CHAPTER I.\n\nThe mill at Harrow Bend had stood idle for eleven years when Thomas Averill came up the river "
        "road with a letter in his pocket and mud to his knees. It was the last week of October. The leaves lay thick "
        "upon the water, and the great wheel, black with age, hung over the race like a thing that had fallen asleep "
        "at its work. He stopped upon the bridge and looked at it a long while. His uncle had left it to him, and with "
        "it a debt, a dog, and a housekeeper who had sworn never to leave the place alive.\n\n"
        "She met him at the door with a candle in her hand, though it was not yet dark.\n\n"
    ),
    "the-survey": (
        "REPORT ON THE SURVEY OF THE NORTHERN COAST, WITH SOME ACCOUNT OF ITS INHABITANTS.\n\n"
        "Sir,—I have the honour to lay before you the particulars of our passage along the northern coast, which we "
        "began on the third of May and ended, through the lateness of the season and the sickness of four of our "
        "number, on the twenty-first of September. The shore is for the most part low and stony. Behind it the ground "
        "rises by easy steps to a range of hills, from which several small rivers descend; and at the mouth of the "
        "largest of them we found a village of some forty houses, whose people received us with great civility.\n\n"
        "Of the harbour I shall speak first. "
    ),
    "the-letter": (
        "My dear sister,—You asked me, when we parted, to set down honestly how I found the house and those who live "
        "in it, and to keep nothing back out of kindness. I shall do as you wish. We arrived on Tuesday evening in a "
        "heavy rain. The coachman had lost his way twice, and Mr. Pell, who sat beside me, had not ceased to talk of "
        "his lawsuit since we left the inn. Picture to yourself, then, with what feelings I saw at last a light among "
        "the trees, and heard the barking of dogs, and was told that this was Coldwater.\n\n"
        "An old gentleman in a grey coat came down the steps to meet us. "
    ),
    "the-lamp": (
        "There was once a lamp-maker who lived at the edge of a great forest, and who had three daughters. The eldest "
        "could sew, and the second could sing, but the youngest could do nothing at all, or so it was said, except "
        "sit by the window and watch the road. One winter, when the snow had lain upon the ground for so many weeks "
        "that the wolves came down as far as the well, a stranger knocked at the door and asked for a lamp that would "
        "burn for a whole night without oil.\n\n"
        '"There is no such lamp," said the lamp-maker.\n\n'
        '"There is," said the youngest daughter, "and I know where it is kept."\n\n'
    ),
}
